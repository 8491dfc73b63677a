"""``epd audit``: it says balanced where everything is accounted for, and names each difference."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from epd_cli.audit import Evidence, StreamState, audit, differences, notes, totals
from epd_cli.brokers import Brokers, embedded_brokers
from epd_common.accounts import Account
from epd_common.bus import Registry
from epd_common.protocol import Cancel, subjects
from epd_common.protocol.codec import encode
from service_stack import broken_part, eventually, picture, text_of
from sim_stack import SimStack, sim_stack

# -- policy ------------------------------------------------------------------------------------------


def test_an_account_adds_up_and_the_first_end_counts() -> None:
    account = Account()
    one, two, _ = account.enter(), account.enter(), account.enter()
    one.end("answered")
    one.end("failed")
    two.end("failed")
    assert account.report() == {"received": 3, "running": 1, "answered": 1, "failed": 1}


def evidence() -> Evidence:
    """A system in which everything is accounted for."""
    arena = {"root": "/a", "files": 2, "bytes": 9, "quota_bytes": 10, "pins": 0, "staged": 0}
    arena |= {"dead_owners": 0, "dead_pins": 0}
    frames = {"answers": 1, "bytes": 5, "counted_bytes": 5, "limit_bytes": 9}
    return Evidence(
        accounts={
            "g": {
                "role": "gateway",
                "node": "n",
                "requests": {"received": 3, "running": 0, "answered": 2, "refused": 1},
                "replies": {"open": 0, "buffered_bytes": 0},
            },
            "p": {
                "role": "pd",
                "node": "n",
                "busy": {"generate": 0},
                "jobs": {"generate": {"received": 3, "running": 0, "answered": 2, "given_back": 1}},
                "pins": {"keys": 0, "users": 0},
                "frames": frames,
                "arena": arena,
            },
        },
        queues={"generate": StreamState(stored=2, left=0, reachable=0)},
    )


def change(*path: str, to: Any) -> Callable[[Evidence], None]:
    def apply(found: Evidence) -> None:
        place: Any = found.accounts
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = to

    return apply


def queue(stored: int, left: int, reachable: int) -> Callable[[Evidence], None]:
    return lambda found: found.queues.update(generate=StreamState(stored, left, reachable))


def test_what_adds_up_is_balanced() -> None:
    found = evidence()
    assert differences(found, idle=True) == []
    assert notes(found) == []
    assert totals(found)["pd"] == {"received": 3, "running": 0, "answered": 2, "given_back": 1}


@pytest.mark.parametrize(
    ("flaw", "says"),
    [
        (change("g", "requests", "received", to=4), "g: 4 requests came, 3 ended and 0 run"),
        (change("p", "busy", "generate", to=1), "p: 0 generate jobs run, and 1 slots are taken"),
        (change("p", "pins", "keys", to=2), "p: it holds 2 pins in memory and nothing runs"),
        (change("p", "arena", "pins", to=1), "p: it holds 1 pinned files and nothing runs"),
        (change("p", "arena", "staged", to=1), "p: it holds 1 unfinished files in the arena"),
        (change("p", "arena", "bytes", to=11), "p: its arena has 11 bytes of 10 allowed"),
        (change("p", "arena", "dead_owners", to=1), "p: its arena holds 0 pins of 1 dead workers"),
        (change("p", "frames", "counted_bytes", to=6), "p: its kept frames are 6 bytes"),
        (change("g", "replies", "open", to=1), "g: it holds 1 open replies and nothing runs"),
        (change("g", "replies", "buffered_bytes", to=7), "g: it holds 7 bytes of replies"),
        (queue(3, 1, 0), "1 jobs lie in the generate queue that nobody will get"),
        (lambda found: found.silent.append("x"), "x is in the registry and does not answer"),
        (lambda found: found.endless.append("k"), "1 keys in Valkey have no time to live: k"),
    ],
)
def test_each_difference_is_named(flaw: Callable[[Evidence], None], says: str) -> None:
    found = copy.deepcopy(evidence())
    flaw(found)
    (wrong,) = differences(found)
    assert wrong.startswith(says)


def test_what_runs_and_waits_is_no_difference_but_where_nothing_is_asked() -> None:
    found = evidence()
    found.queues["generate"] = StreamState(stored=3, left=1, reachable=1)
    jobs = found.accounts["p"]["jobs"]["generate"]
    jobs["received"], jobs["running"] = 4, 1
    found.accounts["p"]["busy"]["generate"] = 1
    found.accounts["p"]["pins"]["keys"] = 1
    found.marks = 1
    assert differences(found) == []
    assert differences(found, idle=True) == [
        "p: 1 generate still run",
        "1 jobs are left in the generate queue",
        "1 marks in Valkey say that a request waits for an encode",
    ]


def test_jobs_of_processes_that_are_gone_and_jobs_done_twice_are_noted() -> None:
    found = evidence()
    found.queues["generate"] = StreamState(stored=5, left=0, reachable=0)
    assert notes(found) == [
        "3 generate jobs were settled by processes that have ended since, or cancelled in the queue"
    ]
    found.queues["generate"] = StreamState(stored=1, left=0, reachable=0)
    assert notes(found) == ["1 generate jobs were settled twice"]


# -- services ----------------------------------------------------------------------------------------


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[Brokers]:
    async with embedded_brokers(tmp_path / "brokers") as running:
        yield running


async def audited(
    own: Brokers, capsys: pytest.CaptureFixture[str], *, within_s: float = 10.0
) -> dict[str, Any]:
    """What the command says of a system that nothing is asked."""
    code = await audit(own.nats_url, own.redis_url, as_json=True, idle=True, within_s=within_s)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if found["balanced"] else 1)
    return found


async def test_what_came_is_what_was_answered_failed_refused_and_cancelled(
    own: Brokers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with sim_stack(own.nats_url, own.redis_url, tmp_path) as stack:
        await stack.start()
        one = picture()
        for _ in range(2):
            text_of(await stack.ask("hello", one, max_tokens=4))
        refused = stack.body("x") | {
            "messages": [{"role": "user", "content": [broken_part()]}],
        }
        assert (await stack.http.post("/v1/chat/completions", json=refused)).status_code == 400
        await go_away(stack)

        found = await audited(own, capsys)
        assert found["differences"] == [] and found["notes"] == []
        assert found["totals"] == {
            "gateway": {
                "received": 4,
                "running": 0,
                "answered": 2,
                "refused": 1,
                "cancelled": 1,
            },
            "generate queue": {"received": 3, "running": 0, "taken": 3},
            "pd": {"received": 3, "running": 0, "answered": 2, "cancelled": 1},
            "encode queue": {"received": 1, "running": 0, "taken": 1},
            "encoder": {"received": 1, "running": 0, "ready": 1},
        }
        metrics = (await stack.http.get("/metrics")).text
        assert "epd_gateway_received_total 4.0" in metrics
        assert 'epd_gateway_ended_total{outcome="cancelled"} 1.0' in metrics

        code = await audit(own.nats_url, own.redis_url, as_json=False, idle=True, within_s=10)
        shown = capsys.readouterr().out
        assert code == 0 and shown.endswith("\nbalanced\n")


async def go_away(stack: SimStack) -> None:
    """Ask, and leave while the answer is awaited."""
    stack.pd_time.passing.clear()
    (pd,) = stack.pds
    asking = asyncio.create_task(stack.ask("never read"))

    async def busy() -> bool:
        return await stack.busy(pd) == 1

    await eventually(busy, "the request runs")
    asking.cancel()

    async def idle() -> bool:
        return await stack.busy(pd) == 0

    await eventually(idle, "the request is cancelled")
    stack.pd_time.passing.set()


async def test_what_is_left_over_is_found(
    own: Brokers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with sim_stack(own.nats_url, own.redis_url, tmp_path) as stack:
        await stack.start()
        (pd,) = stack.pds
        assert (await audited(own, capsys))["balanced"]

        pin = pd.arena / "pins" / pd.id / ("a" * 64)
        pin.touch()
        ghost = pd.arena / "pins" / "ghost" / ("b" * 64)
        ghost.parent.mkdir()
        ghost.touch()
        (pd.arena / "owners" / "ghost").touch()
        await stack.redis.set("epd:v1:media:endless", b"x")
        await stack.redis.zadd("epd:v1:waiting:k", {"r": (time.time() + 60) * 1000})
        nobodys = subjects.generate_subject("no-such-model", "l0")
        await stack.bus.js.publish(nobodys, encode(Cancel(request_id="x")))

        found = await audited(own, capsys, within_s=0)
        assert not found["balanced"]
        wrong = "\n".join(found["differences"])
        for what in (
            f"{pd.id}: it holds 1 pinned files and nothing runs",
            "its arena holds 1 pins of 1 dead workers",
            "2 keys in Valkey have no time to live: epd:v1:",
            "1 marks in Valkey say that a request waits for an encode",
            "1 jobs lie in the generate queue that nobody will get",
        ):
            assert what in wrong, wrong


async def test_a_process_that_was_killed_leaves_a_note_and_no_difference(
    own: Brokers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with sim_stack(own.nats_url, own.redis_url, tmp_path) as stack:
        await stack.start(pds=2)
        text_of(await stack.ask("hello", max_tokens=4))
        answered = [pd for pd in stack.pds if (await stack.counters(pd)).get("answered")]
        await answered[0].process.stop()
        async with Registry(stack.bus) as registry:
            gone = [v.record.worker for v in registry.workers("pd")]
        assert answered[0].id not in gone
        found = await audited(own, capsys)
        assert found["balanced"]
        assert found["notes"] == [
            "1 generate jobs were settled by processes that have ended since, or cancelled in the queue"
        ]
