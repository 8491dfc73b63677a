"""Supervising what `epd up` started, with a real broker."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from epd_cli.backoff import Backoff
from epd_cli.brokers import BrokerError, Brokers, embedded_brokers
from epd_cli.stack import Stack, StackOptions, read_state, run_stack
from epd_sim.faults import CRASH_EXIT
from service_stack import CHAT, eventually


def stack_of(brokers: Brokers, folder: Path) -> Stack:
    options = StackOptions(model="none", state_dir=folder)
    return Stack(options, brokers.nats_url, "", "", [], [], folder, [brokers.nats])


async def test_a_broker_that_dies_is_started_again(tmp_path: Path) -> None:
    async with embedded_brokers(tmp_path, redis=False) as brokers:
        stop, said = asyncio.Event(), list[str]()
        url, pid = brokers.nats_url, brokers.nats.pid
        supervising = asyncio.create_task(stack_of(brokers, tmp_path).supervise(stop, said.append))
        await asyncio.sleep(0)
        await brokers.nats.kill()
        await eventually(lambda: brokers.nats.running and brokers.nats.pid != pid, "a new server")
        assert brokers.nats_url == url
        assert "NATS ended" in said[0]
        stop.set()
        async with asyncio.timeout(10):
            await supervising


async def test_a_broker_that_cannot_be_started_again_ends_the_stack(tmp_path: Path) -> None:
    async with embedded_brokers(tmp_path, redis=False) as brokers:
        supervising = asyncio.create_task(
            stack_of(brokers, tmp_path).supervise(asyncio.Event(), lambda text: None)
        )
        await asyncio.sleep(0)
        brokers.nats.binary = tmp_path / "nothing"
        await brokers.nats.kill()
        with pytest.raises(BrokerError, match="cannot run"):
            async with asyncio.timeout(10):
                await supervising


def test_pauses_between_restarts_grow_up_to_a_bound() -> None:
    backoff = Backoff()
    assert [backoff.pause_s(1.0) for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert [backoff.pause_s(3600.0), backoff.pause_s(1.0)] == [1, 2]  # it had run well


@pytest.mark.slow
async def test_a_service_that_dies_is_started_again_and_serves(tmp_path: Path) -> None:
    """With its encoder killed once, and a PD worker that crashes at each fifth step."""
    said: list[str] = []
    stop = asyncio.Event()
    options = StackOptions(
        model="sim",
        engine="sim",
        port=0,
        pds=2,
        state_dir=tmp_path,
        environment={
            "EPD_SIM_PROFILE": "instant",
            "EPD_SIM_FAULT_WORKERS": "pd-1",
            "EPD_SIM_CRASH_AT": "5",
        },
    )
    async with run_stack(options, lambda view: None) as stack:
        (encoder,) = (service for service in stack.services if service.role == "encoder")
        before = {service.worker_id: service.pid for service in stack.services}
        supervising = asyncio.create_task(stack.supervise(stop, said.append))
        await asyncio.sleep(0)
        encoder.signal(signal.SIGKILL)
        await eventually(
            lambda: encoder.pid != before["encoder-1"] and encoder.returncode is None, "it is back"
        )
        await eventually(
            lambda: read_state(tmp_path)["processes"][1]["pid"] == encoder.pid, "others see it"
        )
        async with httpx.AsyncClient(base_url=stack.gateway_url, timeout=30) as http:

            async def served() -> bool:
                body = {"model": "sim", "messages": [{"role": "user", "content": "x"}]}
                answer = await http.post(CHAT, json=body | {"max_tokens": 4})
                assert answer.status_code == 200, (
                    answer.text
                )  # by the other one, where this one dies
                return any("pd-1 was started again" in line for line in said)

            await eventually(served, "the PD worker has crashed and is back", 60)
        stop.set()
        async with asyncio.timeout(10):
            await supervising
    assert any("encoder-1 ended (exit status -9); starting it again in 1 s" in s for s in said)
    assert any(f"pd-1 ended (exit status {CRASH_EXIT})" in s for s in said)
