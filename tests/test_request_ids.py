"""Every answer of the gateway says which request it was of, and its log says how that ended."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from service_stack import CHAT, ServiceStack, picture, service_stack, text_of


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    async with service_stack(nats_url, redis_url, tmp_path) as running:
        yield running


@pytest.mark.parametrize(
    ("method", "path", "sent", "status"),
    [
        ("GET", "/health", None, 200),
        ("GET", "/nowhere", None, 404),
        ("POST", CHAT, {"messages": 7}, 400),
        ("POST", CHAT, {"model": "nobody's", "messages": []}, 404),
        ("PUT", CHAT, {}, 405),
    ],
)
async def test_every_answer_names_its_request(
    stack: ServiceStack, method: str, path: str, sent: Any, status: int
) -> None:
    theirs = {"x-request-id": "a-clients-own"}
    answers = [await stack.http.request(method, path, json=sent, headers=theirs) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [status] * 2
    names = {answer.headers["x-request-id"] for answer in answers}
    assert len(names) == 2 and all(len(name) == 32 for name in names)


async def test_the_workers_know_it_by_that_name(stack: ServiceStack) -> None:
    answer = await stack.ask("x")
    assert text_of(answer) == "x"
    assert stack.pds[0].engine.begun == [answer.headers["x-request-id"]]


async def test_a_failure_is_found_in_the_log(
    stack: ServiceStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "epd_gateway")
    stack.encoders[0].engine.gate.clear()
    body = stack.body("x", picture())
    answer = await stack.http.post(CHAT, json=body, headers={"x-epd-deadline-s": "0.5"})
    stack.encoders[0].engine.gate.set()
    assert answer.status_code == 504
    (found,) = [r for r in caplog.records if r.name == "epd_gateway.relay"]
    assert found.levelno == logging.WARNING and "ended with 504" in found.message
    assert vars(found)["request_id"] == answer.headers["x-request-id"]
    assert vars(found)["key"] == stack.key(picture_of(body))


def picture_of(body: dict[str, Any]) -> bytes:
    """The picture of a body."""
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    return base64.b64decode(url.partition(",")[2])


async def test_refusals_are_counted_with_their_status(stack: ServiceStack) -> None:
    await stack.http.post(CHAT, json={"messages": 7, "priority": "high", "model": stack.model})
    await stack.http.post(CHAT, content=b"{", headers={"content-type": "application/json"})
    metrics = (await stack.http.get("/metrics")).text
    counted = [
        line for line in metrics.splitlines() if line.startswith("epd_gateway_requests_total{")
    ]
    assert counted == [f'epd_gateway_requests_total{{route="{CHAT}",status="400"}} 2.0']
