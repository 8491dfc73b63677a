"""A broker that runs and cannot write: it is started anew, once that helps."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from epd_cli import broker_store
from epd_cli.broker_store import LONGEST_S, STEADY_S, UNUSABLE_S, StoreWatch, until_room
from epd_cli.brokers import embedded_brokers
from service_stack import eventually
from small_tmpfs import on_small_tmpfs
from test_stack import stack_of

MIB = 1 << 20


def restarts(watch: StoreWatch, problem: str, begin: float, seconds: float) -> list[float]:
    """When it would be started anew, looked at each second."""
    times = [begin + second for second in range(int(seconds))]
    return [now - begin for now in times if watch.look(problem, now)]


def test_an_unusable_server_is_started_anew_with_growing_pauses() -> None:
    watch = StoreWatch()
    assert restarts(watch, "", 0, 100) == []
    pauses = restarts(watch, "no room", 1000, 300)
    assert pauses[0] == UNUSABLE_S
    gaps = [later - earlier for earlier, later in itertools.pairwise(pauses)]
    assert gaps[:3] == [11, 21, 41] and max(gaps) == LONGEST_S + 1


def test_a_short_problem_is_waited_for() -> None:
    watch = StoreWatch()
    for begin in range(0, 100, 10):
        assert restarts(watch, "slow", begin, UNUSABLE_S - 1) == []
        assert restarts(watch, "", begin + 5, 1) == []


def test_a_server_that_was_well_for_long_is_quick_again() -> None:
    watch = StoreWatch()
    restarts(watch, "no room", 0, 100)
    assert restarts(watch, "", 100, STEADY_S + 1) == []
    assert restarts(watch, "no room", 1000, 10) == [UNUSABLE_S]


@pytest.mark.slow
async def test_a_server_that_is_well_says_nothing(tmp_path: Path) -> None:
    async with embedded_brokers(tmp_path, redis=False) as brokers:
        assert await brokers.nats.problem() == ""
        await brokers.nats.kill()
        assert await brokers.nats.problem() == "", "that is for who waits for its process"


async def test_an_unusable_server_is_started_anew_at_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_store, "UNUSABLE_S", 0.0)
    monkeypatch.setattr("epd_cli.stack.LOOK_S", 0.05)
    async with embedded_brokers(tmp_path, redis=False) as brokers:
        nats, stop, said = brokers.nats, asyncio.Event(), list[str]()
        url, pid = nats.url, nats.pid

        async def problem() -> str:
            return "write error" if nats.pid == pid else ""

        monkeypatch.setattr(nats, "problem", problem)
        room = False
        monkeypatch.setattr("epd_cli.stack.has_room", lambda folder: room)
        supervising = asyncio.create_task(stack_of(brokers, tmp_path).supervise(stop, said.append))
        await eventually(lambda: bool(said), "it is said")
        assert nats.pid == pid and "make room" in said[0]
        await asyncio.sleep(0.3)
        assert (nats.pid, len(said)) == (pid, 1), "on a full disk it would not come up"
        room = True
        await eventually(lambda: nats.running and nats.pid != pid, "a new server")
        assert nats.url == url and "cannot write although it runs: write error" in said[1]
        stop.set()
        async with asyncio.timeout(10):
            await supervising


async def test_room_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = iter([False, False, True])
    monkeypatch.setattr(broker_store, "has_room", lambda folder: next(room))
    monkeypatch.setattr(broker_store, "LOOK_S", 0.01)
    said: list[str] = []
    await until_room("NATS", tmp_path, said.append)
    assert len(said) == 1 and "NATS is started once 8 MiB are free" in said[0]


@pytest.mark.slow
def test_a_full_disk_of_nats_is_over_once_there_is_room(tmp_path: Path) -> None:
    script = Path(__file__).with_name("nats_on_small_tmpfs.py")
    command = [sys.executable, str(script), str(tmp_path / "disk")]
    run = subprocess.run(
        on_small_tmpfs(tmp_path / "disk", 40 * MIB, command),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    facts = json.loads(run.stdout.splitlines()[-1])
    assert facts["first"] and facts["while_full"] == [False, False, False]
    assert "no space left" in facts["problem"]
    assert facts["same_server_while_full"], "which would not come up"
    assert facts["again"] and facts["problem_at_last"] == ""
    assert facts["kept"] >= 2, "what it had is still there"
    assert "make room" in facts["said"][0] and "cannot write although" in facts["said"][1]
