"""``epd audit``: is everything that came in accounted for, and is nothing held for what is over?

Two sources are compared. The accounts of processes that live say what came to each, how it ended and what
it holds; they are gone with a process that is killed. What lasts says the rest: the streams (no job that
nobody will get), Valkey (nothing without an end), the arenas (nothing of the dead).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import nats.errors
import nats.js.errors
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from epd_cli.connect import operator_bus, operator_redis
from epd_cli.visible import cell
from epd_common.bus import Bus, Registry
from epd_common.bus.micro import AUDIT
from epd_common.bus.streams import STREAMS
from epd_common.health import ask_health
from epd_common.protocol import subjects
from epd_common.store.redis_client import redis_errors

AGAIN_S = 0.5
SCAN_COUNT = 500
STAGES = {"generate": "pd", "encode": "encoder"}
"""The stage that takes the jobs of a queue, as the table names it."""


@dataclass(slots=True)
class StreamState:
    """A queue: ``stored`` jobs ever, ``left`` of them now, of which somebody will get ``reachable``."""

    stored: int
    left: int
    reachable: int


@dataclass(slots=True)
class Evidence:
    """All that is looked at.

    Attributes:
        accounts: The processes' own, by worker id.
        silent: Processes that the registry holds for alive and that do not answer.
        dead: Those whose heartbeats have ended.
        queues: By stage.
        letters: Dead letters that lie in their stream.
        keys: Of Valkey, by their kind.
        endless: Keys of Valkey that no time to live ends.
        pending: Encodes that are claimed, under a lease that runs and under one that is over.
        marks: Of requests that wait for an encode.
    """

    accounts: dict[str, dict[str, Any]] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    queues: dict[str, StreamState] = field(default_factory=dict)
    letters: int = 0
    keys: dict[str, int] = field(default_factory=dict)
    endless: list[str] = field(default_factory=list)
    pending: dict[str, int] = field(default_factory=lambda: {"leased": 0, "lease_over": 0})
    marks: int = 0

    def of(self, *roles: str) -> list[tuple[str, dict[str, Any]]]:
        return [(name, a) for name, a in sorted(self.accounts.items()) if a["role"] in roles]


def differences(found: Evidence, *, idle: bool = False) -> list[str]:
    """What does not add up; empty means balanced. Pure.

    Args:
        idle: Nothing is being asked now, so nothing may be running, waiting or held.
    """
    wrong = [f"{name} is in the registry and does not answer" for name in found.silent]
    for name, accounts in sorted(found.accounts.items()):
        wrong += [f"{name}: {what}" for what in _of_process(accounts, idle)]
    for stage, queue in found.queues.items():
        if queue.left > queue.reachable:
            wrong.append(
                f"{queue.left - queue.reachable} jobs lie in the {stage} queue that nobody will get"
            )
        if idle and queue.left:
            wrong.append(f"{queue.left} jobs are left in the {stage} queue")
    if idle and found.marks:
        wrong.append(f"{found.marks} marks in Valkey say that a request waits for an encode")
    if found.endless:
        shown = ", ".join(found.endless[:3])
        wrong.append(f"{len(found.endless)} keys in Valkey have no time to live: {shown}")
    arenas = {a["arena"]["root"] + a["node"]: (name, a["arena"]) for name, a in found.of(*_WORKERS)}
    for name, arena in arenas.values():
        if arena["dead_owners"]:
            wrong.append(
                f"{name}: its arena holds {arena['dead_pins']} pins of {arena['dead_owners']} dead workers"
            )
        if arena["bytes"] > arena["quota_bytes"]:
            wrong.append(
                f"{name}: its arena has {arena['bytes']} bytes of {arena['quota_bytes']} allowed"
            )
    return wrong


def notes(found: Evidence) -> list[str]:
    """Where the queues and the workers that live now have different counts, which is no fault. Pure.

    The accounts of a process end with it, and a job whose acknowledgement was lost is settled twice.
    """
    said = []
    for stage, queue in found.queues.items():
        settled = sum(
            n
            for _, accounts in found.of(*_WORKERS)
            for how, n in accounts["jobs"].get(stage, {}).items()
            if how not in _NOT_SETTLED
        )
        taken = queue.stored - queue.left
        if settled < taken:
            said.append(
                f"{taken - settled} {stage} jobs were settled by processes that have ended since, or "
                "cancelled in the queue"
            )
        elif settled > taken:
            said.append(f"{settled - taken} {stage} jobs were settled twice")
    return said


_WORKERS = ("encoder", "pd")
_NOT_SETTLED = ("received", "running", "given_back", "repeated", "taken_over")


def _of_process(accounts: dict[str, Any], idle: bool) -> list[str]:
    wrong = []
    accounts_of: dict[str, dict[str, int]] = dict(accounts.get("jobs", {}))
    if "requests" in accounts:
        accounts_of["requests"] = accounts["requests"]
    running = 0
    for what, account in accounts_of.items():
        ended = sum(n for how, n in account.items() if how not in ("received", "running"))
        running += account["running"]
        if account["received"] != ended + account["running"]:
            wrong.append(
                f"{account['received']} {what} came, {ended} ended and {account['running']} run"
            )
        busy = accounts.get("busy", {}).get(what, account["running"])
        if busy != account["running"]:
            wrong.append(f"{account['running']} {what} jobs run, and {busy} slots are taken")
        if idle and account["running"]:
            wrong.append(f"{account['running']} {what} still run")
    frames = accounts.get("frames")
    if frames and (
        frames["bytes"] != frames["counted_bytes"] or frames["bytes"] > frames["limit_bytes"]
    ):
        wrong.append(f"its kept frames are {frames['counted_bytes']} bytes, counted {frames}")
    if running == 0:  # then it has nothing to hold anything for
        pins = accounts.get("pins", {"keys": 0})["keys"]
        files = accounts.get("arena", {"pins": 0, "staged": 0})
        replies = accounts.get("replies", {"open": 0, "buffered_bytes": 0})
        for count, what in (
            (pins, "pins in memory"),
            (files["pins"], "pinned files"),
            (files["staged"], "unfinished files in the arena"),
            (replies["open"], "open replies"),
            (replies["buffered_bytes"], "bytes of replies"),
        ):
            if count:
                wrong.append(f"it holds {count} {what} and nothing runs")
    return wrong


async def collect(bus: Bus, registry: Registry, redis: Redis) -> Evidence:
    """Look at everything once."""
    found = Evidence()
    views = registry.workers()
    found.dead = [view.record.worker for view in views if not view.alive]
    alive = [view.record for view in views if view.alive and view.record.state != "starting"]
    answers = await asyncio.gather(*(_accounts(bus, record.worker) for record in alive))
    for record, accounts in zip(alive, answers, strict=True):
        if accounts is None:
            found.silent.append(record.worker)
        else:
            found.accounts[record.worker] = accounts
    for stage, stream in STREAMS.items():
        found.queues[stage] = await _queue(bus, stream)
    found.letters = (await bus.js.stream_info(subjects.DLQ_STREAM)).state.messages
    with redis_errors():
        await _look_at_keys(redis, found)
    return found


async def _accounts(bus: Bus, worker: str) -> dict[str, Any] | None:
    try:
        answer: Any = await ask_health(bus, worker, AUDIT)
    except (TimeoutError, nats.errors.Error):
        return None
    accounts: dict[str, Any] | None = answer.get("audit")
    return accounts


async def _queue(bus: Bus, stream: str) -> StreamState:
    info = await bus.js.stream_info(stream)
    consumers = await bus.js.consumers_info(stream)
    reachable = sum((c.num_pending or 0) + (c.num_ack_pending or 0) for c in consumers)
    return StreamState(info.state.last_seq, info.state.messages, reachable)


async def _look_at_keys(redis: Redis, found: Evidence) -> None:
    kinds: Counter[str] = Counter()
    now_ms = time.time() * 1000
    names: list[bytes] = [
        name async for name in redis.scan_iter(match="epd:v1:*", count=SCAN_COUNT)
    ]
    for start in range(0, len(names), SCAN_COUNT):
        part = names[start : start + SCAN_COUNT]
        pipe = redis.pipeline(transaction=False)
        for name in part:
            pipe.pttl(name)
            if name.startswith(b"epd:v1:state:"):
                pipe.hmget(name, "state", "until")
            elif name.startswith(b"epd:v1:waiting:"):
                pipe.zcount(name, f"({now_ms:.0f}", "+inf")
        rows = iter(await pipe.execute())
        for name in part:
            kinds[name.split(b":")[2].decode()] += 1
            if next(rows) == -1:
                found.endless.append(name.decode())
            if name.startswith(b"epd:v1:state:"):
                state, until = next(rows)
                if state == b"pending":
                    if until is None:
                        found.endless.append(f"{name.decode()} (claimed without a lease)")
                    else:
                        found.pending["leased" if int(until) > now_ms else "lease_over"] += 1
            elif name.startswith(b"epd:v1:waiting:"):
                found.marks += next(rows)
    found.keys = dict(kinds)


async def until_balanced(
    bus: Bus, registry: Registry, redis: Redis, *, idle: bool, within_s: float
) -> tuple[Evidence, list[str]]:
    """Look until it adds up or the time is over: things move while one looks."""
    give_up = time.monotonic() + within_s
    while True:
        try:
            found = await collect(bus, registry, redis)
            wrong = differences(found, idle=idle)
        except (nats.js.errors.Error, nats.errors.Error, TimeoutError) as error:
            found, wrong = Evidence(), [f"the streams could not be read: {error}"]
        if not wrong or time.monotonic() >= give_up:
            return found, wrong
        await asyncio.sleep(AGAIN_S)


async def audit(
    nats_url: str, redis_url: str, *, as_json: bool, idle: bool, within_s: float
) -> int:
    """Print the accounts and a verdict; exit code 1 where they do not add up."""
    async with (
        operator_bus(nats_url, name="epd audit") as bus,
        operator_redis(redis_url) as redis,
        Registry(bus) as registry,
    ):
        found, wrong = await until_balanced(bus, registry, redis, idle=idle, within_s=within_s)
    if as_json:
        print(
            json.dumps(
                {
                    "balanced": not wrong,
                    "differences": wrong,
                    "notes": notes(found),
                    "totals": totals(found),
                    "evidence": msgspec.to_builtins(found),
                },
                indent=1,
            )
        )
    else:
        _print(found, wrong)
    return 1 if wrong else 0


def totals(found: Evidence) -> dict[str, dict[str, int]]:
    """What came, runs and ended, by stage; of the processes that live now."""
    sums: dict[str, Counter[str]] = {"gateway": Counter()}
    for _, accounts in found.of("gateway"):
        sums["gateway"].update(accounts["requests"])
    for stage, taker in STAGES.items():
        queue = found.queues.get(stage)
        if queue is not None:
            sums[f"{stage} queue"] = Counter(
                received=queue.stored, running=queue.left, taken=queue.stored - queue.left
            )
        sums[taker] = Counter()
        for _, accounts in found.of(*_WORKERS):
            sums[taker].update(accounts["jobs"].get(stage, {}))
    return {stage: dict(counts) for stage, counts in sums.items()}


def _print(found: Evidence, wrong: list[str]) -> None:
    table = Table(title="accounts of the processes that live now", title_justify="left")
    for column in ("stage", "came", "run or wait", "ended"):
        table.add_column(column)
    for stage, counts in totals(found).items():
        ended = ", ".join(
            f"{how} {n}" for how, n in counts.items() if how not in ("received", "running")
        )
        table.add_row(stage, str(counts.get("received", 0)), str(counts.get("running", 0)), ended)
    console = Console()
    console.print(table)
    held = Table(title="what is held now", title_justify="left")
    for column in ("process", "node", "pins", "unfinished files", "frames kept", "replies open"):
        held.add_column(column)
    for name, a in found.of("gateway", *_WORKERS):
        arena = a.get("arena", {})
        held.add_row(
            cell(name),
            cell(a["node"]),
            str(arena.get("pins", "")),
            str(arena.get("staged", "")),
            str(a.get("frames", {}).get("answers", "")),
            str(a.get("replies", {}).get("open", "")),
        )
    console.print(held)
    print(
        f"dead letters: {found.letters}; Valkey: {found.keys}, claims {found.pending}; "
        f"processes gone without a word: {', '.join(found.dead) or 'none'}"
    )
    for what in notes(found):
        print(f"note: {what}")
    for what in wrong:
        print(f"difference: {what}")
    print(f"{len(wrong)} differences" if wrong else "balanced")
