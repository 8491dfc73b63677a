"""Rolling restarts of every service in turn, under load, with simulated engines: nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from load import Balancer
from service_stack import BOUND_S, CHAT, Process, eventually, picture, text_of
from sim_stack import SimStack, sim_stack

pytestmark = pytest.mark.slow  # services that are started and stopped under load

STEP_S = 0.004


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[SimStack]:
    async with sim_stack(nats_url, redis_url, tmp_path) as made:
        made.pd_time.real_s = made.encoder_time.real_s = STEP_S
        yield made


def given_back(caplog: pytest.LogCaptureFixture) -> int:
    """Jobs that draining workers said that they gave back."""
    told = [record for record in caplog.records if "were given back" in str(record.msg)]
    return sum(record.args[0] for record in told if str(record.msg).startswith("drained"))  # type: ignore[index,misc]


async def test_every_service_is_rolled_under_load(
    stack: SimStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="epd_common.worker")
    await stack.start(encoders=2, pds=2)
    balancer = Balancer(stack.model)
    balancer.add(stack.gateway_url)
    old = stack.gateway
    async with balancer.load():
        await balancer.more(20)
        await stack.add_gateway(drain_notice_s=0.5)
        balancer.add(stack.gateway_url)
        await balancer.more(20)
        await old.stop()
        await balancer.more(20)
        for workers, add in (
            (list(stack.encoders), stack.add_encoder),
            (list(stack.pds), stack.add_pd),
        ):
            for worker in workers:
                await worker.process.stop()
                await add()
                (stack.encoders if worker in stack.encoders else stack.pds).remove(worker)
                await stack.ready()
                await balancer.more(20)
    assert balancer.wrong == []
    assert balancer.answered >= 140
    assert given_back(caplog) == 0  # each finished what it had


async def test_what_a_drain_has_no_time_for_is_given_back_and_answered(
    stack: SimStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not after the time that a silent worker has."""
    monkeypatch.setattr("epd_common.bus.streams.ACK_WAIT_S", 300.0)
    caplog.set_level(logging.INFO, logger="epd_common.worker")
    stack.settings["drain_s"] = 0
    stack.pd_time.real_s = 10 * STEP_S
    await stack.start(encoders=2, pds=2)
    balancer = Balancer(stack.model)
    balancer.add(stack.gateway_url)
    async with balancer.load(at_once=8, streams=False):
        for workers, add in (
            (list(stack.encoders), stack.add_encoder),
            (list(stack.pds), stack.add_pd),
        ):
            for worker in workers:
                await balancer.more(8)
                new = await add()
                await stack.ready()
                await worker.process.stop()
                assert new.process is not worker.process
                (stack.encoders if worker in stack.encoders else stack.pds).remove(worker)
    assert balancer.wrong == []
    assert given_back(caplog) > 0


# -- each step of a gateway's end ------------------------------------------------------------------


async def test_a_gateway_says_no_first_and_still_answers(stack: SimStack) -> None:
    await stack.start()
    await stack.add_gateway(drain_notice_s=BOUND_S, heartbeat_s=60)
    await stack.ready()
    stack.gateway.terminate()

    def draining() -> bool:
        views = stack.registry.workers("gateway")
        (view,) = (view for view in views if view.record.worker == stack.gateway_id)
        return view.record.state == "draining"

    await eventually(draining, "the registry says so long before the next heartbeat")
    ready = await stack.http.get("/ready")
    assert (ready.status_code, ready.headers["connection"]) == (503, "close")
    assert "shutting down" in ready.json()["error"]["message"]
    answer = await stack.ask("late", picture())
    assert text_of(answer)
    assert answer.headers["connection"] == "close"
    with pytest.raises(TimeoutError):  # the notice is not over
        await asyncio.wait_for(asyncio.shield(stack.gateway.task), 0.2)
    stack.gateway.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stack.gateway.task


async def _streaming(stack: SimStack, http: httpx.AsyncClient) -> tuple[asyncio.Task[str], Process]:
    """A stream of the gateway that has begun, while the engine stands still, and that gateway."""
    begun = asyncio.Event()
    stack.pd_time.hold_after = 3

    async def read() -> str:
        body = stack.body("long", stream=True, max_tokens=30)
        seen = ""
        async with http.stream("POST", CHAT, json=body) as response:
            async for piece in response.aiter_text():
                seen += piece
                begun.set()
        return seen

    reading = asyncio.create_task(read())
    async with asyncio.timeout(BOUND_S):
        await begun.wait()
    return reading, stack.gateway


async def test_open_streams_of_a_draining_gateway_go_on(stack: SimStack) -> None:
    await stack.start()
    reading, gateway = await _streaming(stack, stack.http)
    await stack.add_gateway()
    gateway.terminate()
    await asyncio.sleep(0.3)  # past its notice of 0 s and uvicorn's own pause
    assert not reading.done()
    stack.pd_time.passing.set()
    seen = await asyncio.wait_for(reading, BOUND_S)
    assert seen.endswith("data: [DONE]\n\n")
    assert "error" not in seen
    await asyncio.wait_for(gateway.task, BOUND_S)


async def test_what_does_not_end_within_the_drain_ends_with_an_error(stack: SimStack) -> None:
    await stack.start()
    await stack.add_gateway(drain_s=0.2)
    await stack.ready()
    reading, gateway = await _streaming(stack, stack.http)
    asking = asyncio.create_task(stack.ask("whole"))
    await eventually(lambda: _open(stack, 2), "both are under way")
    gateway.terminate()
    seen = await asyncio.wait_for(reading, BOUND_S)
    *_, event, mark, rest = seen.split("\n\n")
    assert (mark, rest) == ("data: [DONE]", "")
    error = json.loads(event.removeprefix("data: "))["error"]
    assert (error["code"], error["stage"]) == ("gateway_stopped", "reply")
    refused = await asyncio.wait_for(asking, BOUND_S)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    await asyncio.wait_for(gateway.task, BOUND_S)
    stack.pd_time.passing.set()
    await eventually(lambda: _busy(stack, 0), "the worker was told to stop")


async def _open(stack: SimStack, count: int) -> bool:
    metrics = (await stack.http.get("/metrics")).text
    return f"epd_gateway_open_requests {float(count)}" in metrics


async def _busy(stack: SimStack, count: int) -> bool:
    return await stack.busy(stack.pds[0]) == count
