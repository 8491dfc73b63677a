"""Sending a workload's requests: at their times (open loop), or as answers come (closed loop)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from epd_bench.arrivals import arrival_times
from epd_bench.bodies import BodyMaker
from epd_bench.client import Client, Outcome
from epd_bench.options import Pace
from epd_bench.stream import StreamWatch
from epd_bench.workloads import Picture, Request
from epd_common.tasks import end

AHEAD = 4
"""Bodies that are made before their time, so that making them makes none late."""


@dataclass(frozen=True, slots=True)
class Open:
    """A request that is under way: when it was sent, after the beginning, and its stream up to now."""

    at_s: float
    images: int
    watch: StreamWatch


@dataclass(slots=True)
class Load:
    """What is under way and what has come of it.

    Attributes:
        outcomes: In the order in which the requests ended.
        open: Those that have not, by their numbers.
        pictures: All that were sent.
    """

    planned: int | None
    began: float = field(default_factory=time.monotonic)
    outcomes: list[Outcome] = field(default_factory=list)
    open: dict[int, Open] = field(default_factory=dict)
    pictures: set[Picture] = field(default_factory=set)
    sent: int = 0
    aborted: bool = False

    @property
    def lasted_s(self) -> float:
        """From the beginning to the last end of a request."""
        return max((o.at_s + o.e2e_s for o in self.outcomes), default=0.0)


Look = Callable[[Load], bool]
"""Is shown the load each time something has happened, and several times a second; True ends it at once."""

_LOOK_S = 0.1


async def run_load(
    client: Client,
    bodies: BodyMaker,
    requests: Iterator[Request],
    pace: Pace,
    seed: int,
    look: Look,
) -> Load:
    """Send requests until there were enough, and wait for their answers.

    Args:
        requests: In the order in which they are sent.
        seed: Of the arrivals.
        look: Shows progress, and may end it early: then what is open is cancelled and not counted.
    """
    load = Load(pace.planned())
    running: set[asyncio.Task[None]] = set()
    source = _Source(bodies, requests)
    times = arrival_times(pace.rate, pace.burstiness, seed) if pace.rate else itertools.repeat(0.0)
    sending = asyncio.create_task(_send(client, source, times, pace, load, running), name="sending")
    try:
        while waited_for := running if sending.done() else {sending}:
            done, _ = await asyncio.wait(set(waited_for), timeout=_LOOK_S)
            for task in done:
                task.result()
            if look(load):
                load.aborted = True
                break
    finally:
        await end(sending, *running)
    return load


class _Source:
    """Requests with their bodies, some of them made ahead."""

    def __init__(self, bodies: BodyMaker, requests: Iterator[Request]) -> None:
        self._bodies = bodies
        self._requests = requests
        self._ready: list[tuple[Request, bytes]] = []

    def prepare(self) -> None:
        while len(self._ready) < AHEAD:
            request = next(self._requests)
            self._ready.append((request, self._bodies.body(request)))

    def take(self) -> tuple[Request, bytes]:
        if not self._ready:
            self.prepare()
        return self._ready.pop(0)


async def _send(
    client: Client,
    source: _Source,
    times: Iterator[float],
    pace: Pace,
    load: Load,
    running: set[asyncio.Task[None]],
) -> None:
    free = asyncio.Semaphore(pace.users)
    source.prepare()
    load.began = time.monotonic()

    async def one(request: Request, body: bytes, late_s: float) -> None:
        at_s = time.monotonic() - load.began
        watch = StreamWatch()
        load.open[request.number] = Open(at_s, len(request.pictures), watch)
        try:
            outcome = await client.ask(request, body, watch)
        finally:
            del load.open[request.number]
            if not pace.rate:
                free.release()
        outcome.at_s, outcome.late_s = at_s, late_s
        load.outcomes.append(outcome)

    for number in itertools.count():
        if pace.requests is not None and number >= pace.requests:
            return
        due_s = next(times)
        if not pace.rate:
            await free.acquire()
            due_s = time.monotonic() - load.began
        if pace.duration_s is not None and due_s > pace.duration_s and number >= pace.least:
            return
        source.prepare()
        # Also where it is late: the answers must be read in between.
        await asyncio.sleep(max(0.0, due_s - (time.monotonic() - load.began)))
        request, body = source.take()
        late_s = time.monotonic() - load.began - due_s
        load.sent += 1
        load.pictures.update(request.pictures)
        task = asyncio.create_task(one(request, body, late_s), name=f"request {request.number}")
        running.add(task)
        task.add_done_callback(running.discard)
