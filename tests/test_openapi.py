"""The OpenAPI document says what the gateway does, and the gateway does nothing else with odd requests."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from epd_common.errors import ERROR_TYPES
from epd_common.ingest.parts import read_part
from epd_gateway.app import build_app
from epd_gateway.openapi import openapi_document
from epd_sim.answers import expected_answer
from service_stack import CHAT, picture
from sim_stack import SimStack, sim_stack

ROOT = Path(__file__).parents[1]
EXAMPLES = 40
"""Of each operation in the fuzzing phase."""

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
CONFIGURATION = """\
[checks]
# A deadline that a test chooses may be over at once; a gateway may be short of workers.
not_a_server_error = { expected-statuses = ["2xx", "3xx", "4xx", "503", "504"] }
"""


@pytest.fixture(scope="module")
async def stack(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SimStack]:
    async with sim_stack(nats_url, redis_url, tmp_path_factory.mktemp("openapi")) as running:
        await running.start()
        yield running


async def test_the_document_that_is_kept_is_the_one_that_is_served(stack: SimStack) -> None:
    served = await stack.http.get("/openapi.json")
    assert served.json() == json.loads((ROOT / "docs" / "openapi.json").read_text())


async def test_every_route_is_described_and_no_other(stack: SimStack) -> None:
    """An operation of the document is there; each route of the application is in the document."""
    described = {
        (method.upper(), path)
        for path, operations in openapi_document()["paths"].items()
        for method in operations
    }
    for method, path in described:
        found = await stack.http.request(method, path.replace("{name}", "x").replace("{", "x"))
        assert found.json()["error"]["code"] != "unknown_route" if found.is_error else True
    routes = {
        (method, route.path.replace(":path", ""))
        for route in application_routes()
        for method in route.methods
        if method != "HEAD"
    }
    assert routes == described


def application_routes() -> list[Any]:
    """The routes of an application that nobody asks."""
    return [route for route in build_app(MagicMock()).routes if hasattr(route, "methods")]


def test_every_status_is_one_that_errors_have() -> None:
    statuses = {
        int(status)
        for operations in openapi_document()["paths"].values()
        for operation in operations.values()
        for status in operation["responses"]
    }
    assert statuses - {200, 500} <= set(ERROR_TYPES)


def test_every_kind_of_part_is_one_that_ingest_reads() -> None:
    for kind in openapi_document()["components"]["schemas"]["Part"]["anyOf"]:
        if kind["type"] != "object":
            continue
        part = {name: example(schema) for name, schema in kind["properties"].items()}
        read_part(part, "here")  # raises where it is none


def example(schema: dict[str, Any]) -> Any:
    if "const" in schema:
        return schema["const"]
    if "$ref" in schema:
        return {"url": "data:,x"}
    if schema["type"] == "object":
        return {name: example(inner) for name, inner in schema["properties"].items()}
    return "x"


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.timeout(420)
async def test_odd_requests_get_what_the_document_says(stack: SimStack, tmp_path: Path) -> None:
    document = (await stack.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    # Else nearly all are for models of no name.
    for name in ("ChatRequest", "CompletionRequest", "ResponseRequest"):
        schemas[name]["properties"]["model"] = {"enum": [stack.model]}
    source = tmp_path / "openapi.json"
    source.write_text(json.dumps(document))
    settings = tmp_path / "schemathesis.toml"
    settings.write_text(CONFIGURATION)
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        *("--config-file", str(settings), "run", str(source)),
        *("--url", str(stack.http.base_url), "--checks", ",".join(CHECKS)),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES)),
        "--generation-deterministic",
        *("--request-timeout", "30", "--no-color", "--continue-on-failure"),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path
    )
    try:
        async with asyncio.timeout(400):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, out.decode()[-12_000:]
    body = stack.body("after", data := picture())
    answer = await stack.http.post(CHAT, json=body)
    assert answer.json()["choices"][0]["message"]["content"] == expected_answer(body, [data])
