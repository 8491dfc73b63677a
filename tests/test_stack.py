"""Supervising what `epd up` started, with a real broker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from epd_cli.backoff import Backoff
from epd_cli.brokers import BrokerError, Brokers, embedded_brokers
from epd_cli.processes import ServiceProcess
from epd_cli.stack import Stack, StackOptions, _sweep_arenas, read_state, run_stack
from epd_common.lifecycle import EXIT_FAILED
from epd_sim.faults import CRASH_EXIT
from load import Balancer
from service_stack import CHAT, eventually, request_body


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


async def test_a_state_folder_that_cannot_be_made_gives_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BrokerError, match=r"cannot make the state folder .*; choose another one"):
        async with run_stack(sim_options(tmp_path / "file"), lambda view: None):
            pass


def test_pauses_between_restarts_grow_up_to_a_bound() -> None:
    backoff = Backoff()
    assert [backoff.pause_s(1.0) for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert [backoff.pause_s(3600.0), backoff.pause_s(1.0)] == [1, 2]  # it had run well


def sim_options(folder: Path, **environment: str) -> StackOptions:
    return StackOptions(
        model="sim",
        engine="sim",
        port=0,
        encoders=2,
        pds=2,
        state_dir=folder,
        environment={"EPD_SIM_PROFILE": "instant", **environment},
    )


@contextlib.asynccontextmanager
async def supervised(options: StackOptions, said: list[str]) -> AsyncIterator[Stack]:
    """As `epd up` runs it."""
    stop = asyncio.Event()
    async with run_stack(options, lambda view: None) as stack:
        supervising = asyncio.create_task(stack.supervise(stop, said.append))
        await asyncio.sleep(0)
        try:
            yield stack
        finally:
            stop.set()
            async with asyncio.timeout(10):
                await supervising


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status"), [("EPD_SIM_CRASH_AT", CRASH_EXIT), ("EPD_SIM_HANG_AT", EXIT_FAILED)]
)
async def test_a_service_that_fails_is_started_again_and_serves(
    tmp_path: Path, fault: str, status: int
) -> None:
    """With an encoder that is killed, and a PD worker that crashes, or hangs, at each fifth step."""
    said: list[str] = []
    options = sim_options(tmp_path, EPD_SIM_FAULT_WORKERS="pd-1", EPD_STALL_S="1.5", **{fault: "5"})
    async with supervised(options, said) as stack:
        encoder = next(service for service in stack.services if service.role == "encoder")
        before = encoder.pid
        encoder.signal(signal.SIGKILL)
        await eventually(lambda: encoder.pid != before and encoder.returncode is None, "it is back")
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
    assert any("encoder-1 ended (exit status -9); starting it again in 1 s" in s for s in said)
    assert any(f"pd-1 ended (exit status {status})" in s for s in said)


@pytest.mark.slow
async def test_every_worker_process_is_rolled_under_load(tmp_path: Path) -> None:
    said: list[str] = []
    async with supervised(sim_options(tmp_path), said) as stack:
        balancer = Balancer("sim")
        balancer.add(stack.gateway_url)
        async with balancer.load():
            for service in stack.services:
                if service.role == "gateway":
                    continue
                await balancer.more(20)
                service.signal(signal.SIGTERM)
                again = f"{service.worker_id} was started again"
                await eventually(lambda: any(again in line for line in said), again)  # noqa: B023
                await eventually(lambda: _ready(service), f"{service.worker_id} serves", 30)  # noqa: B023
            await balancer.more(20)
    assert balancer.wrong == []
    assert sum("ended (exit status 0)" in line for line in said) == 4


def _ready(service: ServiceProcess) -> bool:
    """Its log says so a second time: it is the log of all its runs."""
    return service.log_path.read_text().count(" is ready") == 2


@pytest.mark.slow
async def test_what_runs_is_answered_when_everything_is_stopped(tmp_path: Path) -> None:
    """Requests that wait in the queue included, of which a worker that drains takes none any more."""
    options = sim_options(
        tmp_path, EPD_SIM_PROFILE="qwen2.5-vl-7b-h100", EPD_PD_SLOTS="1", EPD_SIM_TIME_SCALE="2"
    )
    async with httpx.AsyncClient(timeout=60) as http:
        async with run_stack(options, lambda view: None) as stack:
            url = stack.gateway_url
            body = request_body("sim", "long", max_tokens=20)
            asking = [asyncio.create_task(http.post(url + CHAT, json=body)) for _ in range(12)]

            async def all_open() -> bool:
                return "epd_gateway_open_requests 12.0" in (await http.get(f"{url}/metrics")).text

            await eventually(all_open, "all are under way")
        answers = await asyncio.gather(*asking)
    assert [answer.status_code for answer in answers] == [200] * 12


@pytest.mark.slow
async def test_two_stacks_of_one_process_have_arenas_of_their_own(tmp_path: Path) -> None:
    async with (
        run_stack(sim_options(tmp_path / "one"), lambda view: None) as one,
        run_stack(sim_options(tmp_path / "two"), lambda view: None) as two,
    ):
        assert one.arena != two.arena
        assert one.arena.is_dir() and two.arena.is_dir()
    assert not one.arena.exists() and not two.arena.exists()


def test_arenas_of_processes_that_are_no_more_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_cli.stack.ARENA_ROOT", tmp_path)
    dead = max(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()) + 7919
    mine, theirs, other = (
        tmp_path / name for name in (f"epdflow-{os.getpid()}-1", f"epdflow-{dead}-1", "epdflow-x")
    )
    for folder in (mine, theirs, other):
        folder.mkdir()
    _sweep_arenas()
    assert mine.exists() and other.exists() and not theirs.exists()
