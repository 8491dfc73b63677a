"""Requests whose embeddings lie in the memory of an encoder on another node."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd_cli.brokers import Brokers, embedded_brokers
from epd_cli.stack import StackOptions, run_stack
from fake_engine import answer_text
from service_stack import (
    BOUND_S,
    CHAT,
    ServiceStack,
    Worker,
    bare_stack,
    eventually,
    picture,
    request_body,
    text_of,
)

pytestmark = pytest.mark.slow

NIXL: dict[str, Any] = {
    "stores": ("arena", "nixl"),
    "nixl_bytes": 16 << 20,
    "nixl_timeout_s": 5.0,  # a machine may have other work
    "nixl_lease_s": 10.0,
}
BOTH: dict[str, Any] = NIXL | {"stores": ("arena", "nixl", "redis")}


@pytest.fixture(scope="module")
async def own(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Brokers]:
    """Brokers on which each service has its role's rights and no others."""
    async with embedded_brokers(tmp_path_factory.mktemp("own")) as running:
        yield running


@pytest.fixture
async def stack(own: Brokers, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    async with bare_stack(own.nats_url, own.redis_url, tmp_path, by_role=own) as running:
        yield running


async def stores_of(stack: ServiceStack, answer: Any) -> list[str]:
    """From which stores the items of an answered request came, by its receipt."""
    url = f"/ui/api/requests/{answer.headers['x-request-id']}"

    async def ended() -> bool:
        return (await stack.http.get(url)).json()["state"] == "answered"

    await eventually(ended, "the request has ended")
    return [item["store"] for item in (await stack.http.get(url)).json()["items"]]


async def fetched(stack: ServiceStack, worker: Worker) -> dict[str, int]:
    """Bytes that a worker had from elsewhere, by store."""
    counters = await stack.counters(worker)
    return {name: counters.get(f"{name}_fetched_bytes", 0) for name in ("nixl", "redis")}


async def test_a_pd_of_another_node_reads_the_encoders_memory(stack: ServiceStack) -> None:
    await stack.add_encoder("a", node="a", **NIXL)
    await stack.add_pd("b", node="b", **NIXL)
    await stack.add_gateway()
    await stack.ready()
    first, second = picture(), picture()
    answer = await stack.ask("far", first, second)
    assert text_of(answer) == answer_text("far", first, second)
    assert await stores_of(stack, answer) == ["nixl", "nixl"]
    moved = await fetched(stack, stack.pds[0])
    assert moved["nixl"] > 0 and moved["redis"] == 0
    again = await stack.ask("again", first)
    assert text_of(again) == answer_text("again", first)
    assert await stores_of(stack, again) == ["arena"], "it is here now"
    assert await fetched(stack, stack.pds[0]) == moved
    assert stack.pds[0].pinned == []


async def test_a_pd_of_the_same_node_moves_no_byte(stack: ServiceStack) -> None:
    await stack.add_encoder("a", node="a", **BOTH)
    await stack.add_pd("a", node="a", **BOTH)
    await stack.add_gateway()
    await stack.ready()
    data = picture()
    answer = await stack.ask("near", data)
    assert text_of(answer) == answer_text("near", data)
    assert await stores_of(stack, answer) == ["arena"]
    assert await fetched(stack, stack.pds[0]) == {"nixl": 0, "redis": 0}


@pytest.mark.parametrize("settings", [NIXL, BOTH], ids=["encoded again", "from Valkey"])
async def test_an_encoder_that_is_gone(stack: ServiceStack, settings: dict[str, Any]) -> None:
    """What only it had is encoded again by another one; what Valkey has as well comes from there."""
    gone = await stack.add_encoder("a", node="a", **settings)
    near = await stack.add_pd("a", node="a", **settings)
    await stack.add_gateway()
    await stack.ready()
    data = picture()
    assert text_of(await stack.ask("x", data)) == answer_text("x", data)
    for worker in (near, gone):
        await worker.process.stop()
    await stack.add_encoder("c", node="c", **settings)
    far = await stack.add_pd("b", node="b", **settings)
    stack.encoders.remove(gone)
    stack.pds.remove(near)
    await stack.ready()
    answer = await stack.ask("y", data)
    assert text_of(answer) == answer_text("y", data)
    with_valkey = "redis" in settings["stores"]
    assert await stores_of(stack, answer) == ["redis" if with_valkey else "nixl"]
    counters = await stack.counters(far)
    assert counters["nixl_failed_unknown"] == 1
    assert counters.get("reordered", 0) == (0 if with_valkey else 1)


async def test_metrics_say_from_where_it_came(stack: ServiceStack) -> None:
    await stack.add_encoder("a", node="a", **NIXL)
    pd = await stack.add_pd("b", node="b", **NIXL)
    await stack.add_gateway()
    await stack.ready()
    await stack.ask("x", picture())
    read = (await stack.counters(pd))["nixl_fetched_bytes"]
    written = (await stack.counters(stack.encoders[0]))["nixl_written_bytes"]
    assert read == written > 0


async def test_an_encoder_that_is_killed_costs_no_second(tmp_path: Path) -> None:
    """`epd up --store nixl`: real processes. What lay in the encoder's memory comes from Valkey."""
    options = StackOptions(
        model="sim",
        engine="sim",
        port=0,
        store="nixl",
        state_dir=tmp_path,
        environment={"EPD_SIM_PROFILE": "instant"},
    )
    async with (
        run_stack(options, lambda view: None) as running,
        httpx.AsyncClient(base_url=running.gateway_url, timeout=BOUND_S) as http,
    ):

        async def ask(data: bytes) -> tuple[str, str, float]:
            """The answer, from which store the picture's embedding came, and how long that took."""
            body = request_body(running.models[0], "x", data, max_tokens=8)
            response = await http.post(CHAT, json=body, headers={"x-epd-explain": "true"})
            (item,) = json.loads(response.headers["x-epd-receipt"])["items"]
            for path in (running.arena / "pd-1" / "data").iterdir():
                path.unlink()  # so that it has to come once more
            return text_of(response), item["store"], item["pinned_s"] - item["ready_s"]

        data, other = picture((448, 448)), picture((448, 476))
        first, store, _ = await ask(data)
        assert store == "nixl"
        again, store, _ = await ask(data)
        assert (again, store) == (first, "nixl")
        assert (await ask(other))[0] != first, "answers are made from what came"
        (encoder,) = (each for each in running.services if each.role == "encoder")
        encoder.signal(signal.SIGKILL)
        await encoder.wait()
        last, store, took = await ask(data)
        assert (last, store) == (first, "redis")
        assert took < 1
