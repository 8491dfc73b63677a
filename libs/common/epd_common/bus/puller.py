"""Pulling jobs from the lanes of a stage, as many as there are free slots.

Each lane is a durable consumer. The puller never has more open pulls than free slots, so a job is only
ever delivered to a worker that can start it. It first looks at the lanes in the order of ``lane_order.py``,
and where all are empty it waits on as many as it may: for long when slots abound, else for ``SHORT_WAIT_S``
at a time, so that no lane stays out of sight. Each pull says how loaded its worker is, and of those that wait
the server answers the least loaded first; so a loaded worker's are renewed after ``LOADED_WAIT_S``.

A worker may have a *home*: a lane of jobs that are meant for it. Where its lanes have nothing it looks into
homes of others, if it was told of some, and takes what lies there. It leaves no pull open there: those of
the owner, which wait, are answered first, and what is found is what the owner cannot take now.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from epd_common.bus.connection import Bus
from epd_common.bus.delivery import Delivery
from epd_common.bus.lane_order import LaneOrder
from epd_common.bus.streams import LOAD_GROUP, STREAMS
from epd_common.bus.work_ahead import WorkAhead, load_level
from epd_common.errors import UnavailableError
from epd_common.protocol.subjects import Stage
from epd_common.tasks import whole

logger = logging.getLogger(__name__)

LONG_WAIT_S = 2.0
"""Not longer, since a pull is lost without a word with the server that led its consumer."""

LOADED_WAIT_S = 0.25
SHORT_WAIT_S = 0.1
ANSWER_S = 1.0
"""A pull that the server has not answered this long after its expiry is held for lost."""

BACKOFF_S = 0.5
GIVE_BACK_S = 0.05

OTHERS_S = 0.25
"""Seconds between looks into homes of others, at most."""

HOME_QUIET_S = 10.0
"""After so long without a job from home the other lanes are waited on before it, where slots are few."""

_OTHERS = -1
_LEAST_URGENT = 9


class _Lane:
    """One durable consumer and its open pull, if any.

    The one that stands for homes of others, number ``_OTHERS``, asks one consumer after another.
    """

    def __init__(self, number: int, consumer: str, inbox: str) -> None:
        self.number = number
        self.consumer = consumer
        self.inbox = inbox
        self.open_until = 0.0
        self.rests_until = 0.0
        self.connection = 0
        self.took_at = -math.inf
        self.subscription: Subscription | None = None


class JobPuller:
    """Yields deliveries from the lanes of a stage while slots are free.

    Args:
        consumers: Durable consumers, the most urgent lane first.
        waits_s: How much longer a job of each lane may wait; see ``LaneOrder``.
        slots: How many jobs may be in work here at once.
        ahead_s: Seconds of work that are taken ahead; see ``WorkAhead``.
        load: How loaded the worker is, from 0 to 9; by the number of its jobs, if it is not given.
        last_lane_slots: Jobs of the last lane are fetched while fewer than so many are in work.
        home: The first consumer is that of jobs that are meant for this worker.
    """

    def __init__(
        self,
        bus: Bus,
        stage: Stage,
        *,
        consumers: Sequence[str],
        waits_s: Sequence[float],
        slots: int,
        last_lane_slots: int,
        worker: str,
        ahead_s: float = 0.0,
        load: Callable[[], int] | None = None,
        home: bool = False,
    ) -> None:
        self._bus = bus
        self.stage: Stage = stage
        self._worker = worker
        self.slots = slots
        self._work = WorkAhead(ahead_s, slots)
        self._load = load or (lambda: load_level(self.busy))
        self._last_lane_slots = last_lane_slots
        self._lanes = [
            _Lane(number, name, bus.client.new_inbox()) for number, name in enumerate(consumers)
        ]
        self._home = self._lanes[0] if home else None
        self._elsewhere = _Lane(_OTHERS, "", bus.client.new_inbox())
        self._all = [*self._lanes, self._elsewhere]
        self._others: tuple[str, ...] = ()
        self.taken_from_others = 0
        """Jobs that were meant for another worker."""
        self._order = LaneOrder(waits_s)
        self._arrived: asyncio.Queue[tuple[_Lane, Msg]] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._stopping = False
        self._resting_until = 0.0

    async def __aenter__(self) -> Self:
        for lane in self._all:
            await self._subscribe(lane)
        return self

    async def _subscribe(self, lane: _Lane) -> None:
        handler = functools.partial(self._on_message, lane)
        lane.subscription = await self._bus.subscribe(lane.inbox, handler)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        for lane in self._all:
            if lane.subscription is not None:
                with contextlib.suppress(nats.errors.Error):
                    await lane.subscription.unsubscribe()
        await self._give_back_arrived()

    def stop(self) -> None:
        """Fetch no more; the iteration ends, and what still arrives is given back."""
        self._stopping = True
        self._changed.set()

    def step_back(self, seconds: float) -> None:
        """Fetch nothing for so long, so that others get what was given back here."""
        self._resting_until = max(self._resting_until, time.monotonic() + seconds)
        self._changed.set()

    def look_at(self, others: Sequence[str]) -> None:
        """Look into these consumers, homes of others, where there is nothing else to do."""
        self._others = tuple(others)

    def release(self) -> None:
        """A job that was yielded is done: its slot is free again."""
        self._work.ended(time.monotonic())
        self._changed.set()

    @property
    def busy(self) -> int:
        """Jobs that were yielded and are not done."""
        return self._work.busy

    async def deliveries(self) -> AsyncIterator[Delivery]:
        """Jobs, the most urgent first; the caller calls :meth:`release` after each."""
        while not self._stopping:
            if self.rests:
                await self._rest()
                continue
            self._changed.clear()  # before anything is awaited, so that no change is missed
            await self._withdraw()
            if self.busy >= self._work.most and self._arrived.empty():
                await self._changed.wait()
                continue
            message = await self._look() or await self._wait()
            if message is None:
                continue
            if self._stopping or self.rests:
                await self._give_back(message)
                continue
            self._work.began(time.monotonic())
            yield Delivery(self._bus, self.stage, self._worker, message)
            await asyncio.sleep(0)  # the job begins, so the next pull knows how much work it is
        await self._close_pulls(self._all)
        await self._give_back_arrived()

    @property
    def rests(self) -> bool:
        """Whether it stepped back and fetches nothing for now."""
        return time.monotonic() < self._resting_until

    async def _rest(self) -> None:
        """Take all pulls back, and begin anew when the time is over."""
        await self._close_pulls(self._all)
        await self._give_back_arrived()
        while self.rests and not self._stopping:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._resting_until - time.monotonic()):
                    await self._changed.wait()
        if not self._stopping:
            for lane in self._all:
                await self._subscribe(lane)

    @property
    def _free(self) -> int:
        return self.slots - self.busy

    def _may_open(self, lane: _Lane) -> bool:
        if self._stopping or self._is_open(lane) or time.monotonic() < lane.rests_until:
            return False
        opened = sum(self._is_open(other) for other in self._all)
        return opened < self._free and self._has_room(lane)

    def _is_open(self, lane: _Lane) -> bool:
        """Whether the server may still answer the lane's pull. It forgets pulls of a lost connection."""
        return time.monotonic() < lane.open_until and lane.connection == self._bus.reconnects

    async def _withdraw(self) -> None:
        """Take pulls back that should not be answered any more.

        Long ones, where they hold every free slot while another lane has none: they were opened when slots
        abounded, and the lanes they wait on may stay empty for long. All of them, where there is enough in
        work.
        """
        opened = [lane for lane in self._lanes if self._is_open(lane)]
        soon = time.monotonic() + SHORT_WAIT_S + ANSWER_S
        hoarded = self._free <= len(opened) < len(self._lanes)
        withdrawn = [
            lane
            for lane in opened
            if (hoarded and lane.open_until > soon) or not self._has_room(lane)
        ]
        if not withdrawn:
            return
        await self._close_pulls(withdrawn)
        for lane in withdrawn:
            await self._subscribe(lane)

    def _has_room(self, lane: _Lane) -> bool:
        """Whether one more of the lane's jobs may come to those in work."""
        most = self._work.most
        return self.busy < (min(self._last_lane_slots, most) if lane is self._lanes[-1] else most)

    async def _close_pulls(self, lanes: Sequence[_Lane]) -> None:
        """A pull ends with its inbox. What was sent there before still arrives."""

        async def close(subscription: Subscription) -> None:
            with contextlib.suppress(nats.errors.Error):
                if self._bus.connected:
                    await whole(subscription.drain())  # for why, see Bus.flush
                else:
                    await subscription.unsubscribe()

        subscriptions = [lane.subscription for lane in lanes if lane.subscription is not None]
        await asyncio.gather(*map(close, subscriptions))
        for lane in lanes:
            lane.subscription = None
            lane.inbox = self._bus.client.new_inbox()
            lane.open_until = 0.0

    async def _look(self) -> Msg | None:
        """Ask each lane in turn for a job that is there now."""
        while not self._arrived.empty():  # jobs, and lanes that say that they have none
            if message := await self._next(0):
                return message
        for number in self._order.order():
            lane = self._lanes[number]
            if self._may_open(lane):
                await self._pull(lane, wait_s=0)
                if message := await self._next(ANSWER_S):
                    return message
        for consumer in self._others:
            if self._may_open(self._elsewhere):
                self._elsewhere.consumer = consumer
                await self._pull(self._elsewhere, wait_s=0)
                if message := await self._next(ANSWER_S):
                    return message
        return None

    async def _wait(self) -> Msg | None:
        """Leave pulls open on the lowest lanes, and wait for whichever job comes first."""
        plenty = self._free >= 2 * len(self._lanes)
        long_s = LOADED_WAIT_S if self._load() else LONG_WAIT_S
        wait_s = long_s if plenty else SHORT_WAIT_S
        lanes = self._lanes
        if self._home and time.monotonic() - self._home.took_at > HOME_QUIET_S:
            lanes = [*lanes[1:], self._home]
        for lane in lanes:
            if self._may_open(lane):
                await self._pull(lane, wait_s=wait_s)
        return await self._next(min(wait_s, OTHERS_S if self._others else ANSWER_S))

    async def _next(self, timeout_s: float) -> Msg | None:
        """The next job that arrives, or None when a lane says that it has none."""
        arrived = asyncio.ensure_future(self._arrived.get())
        stopped = asyncio.ensure_future(self._stopped_or_rests())
        try:
            await asyncio.wait(
                (arrived, stopped), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            stopped.cancel()
            if not arrived.done():
                arrived.cancel()
        if not arrived.done() or arrived.cancelled():
            return None
        lane, message = arrived.result()
        lane.open_until = 0.0
        status = (message.headers or {}).get("Status", "")
        if not status:
            lane.took_at = time.monotonic()
            if lane is self._elsewhere:
                self.taken_from_others += 1
            else:
                published = message.metadata.timestamp.timestamp()
                self._order.took(lane.number, published=published, now=lane.took_at)
            return message
        if status not in ("404", "408"):  # neither "no messages" nor "pull expired"
            logger.warning("consumer %s answers %s; looking again", lane.consumer, message.headers)
            lane.rests_until = time.monotonic() + BACKOFF_S  # the other lanes may be well
        elif lane is not self._elsewhere:
            self._order.found_empty(lane.number, now=time.monotonic())
        return None

    async def _stopped_or_rests(self) -> None:
        while not self._stopping and not self.rests:
            self._changed.clear()
            await self._changed.wait()

    async def _pull(self, lane: _Lane, *, wait_s: float) -> None:
        load = _LEAST_URGENT if lane is self._elsewhere else self._load()
        request: dict[str, object] = {"batch": 1, "group": LOAD_GROUP, "priority": load}
        request |= {"expires": int(wait_s * 1e9)} if wait_s else {"no_wait": True}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{STREAMS[self.stage]}.{lane.consumer}"
        try:
            if not self._bus.connected:  # it would be sent later, when nobody counts it as open
                raise UnavailableError("NATS is disconnected")
            await self._bus.emit_bytes(subject, msgspec.json.encode(request), reply=lane.inbox)
        except UnavailableError as error:
            logger.warning("cannot ask for jobs: %s", error)
            await asyncio.sleep(BACKOFF_S)
            return
        lane.open_until = time.monotonic() + wait_s + ANSWER_S
        lane.connection = self._bus.reconnects

    async def _on_message(self, lane: _Lane, message: Msg) -> None:
        if self._stopping:  # an open pull was answered too late; others should not wait for it
            await self._give_back(message)
        else:
            self._arrived.put_nowait((lane, message))

    async def _give_back_arrived(self) -> None:
        while not self._arrived.empty():
            _, message = self._arrived.get_nowait()
            await self._give_back(message)

    async def _give_back(self, message: Msg) -> None:
        if message.headers and "Status" in message.headers:
            return
        with contextlib.suppress(nats.errors.Error):
            await message.nak(delay=GIVE_BACK_S)
