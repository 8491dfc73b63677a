"""A stage's queue and those who pull from it, with the policies that the workers have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from epd_common.bus.lane_order import LaneOrder
from epd_common.bus.work_ahead import WorkAhead, load_level
from epd_common.protocol.subjects import LANES
from epd_plan.events import Events

Job = TypeVar("Job")

_LEVELS = 10


class Queue(Generic[Job]):
    """The lanes of a stage. A job goes to the least loaded worker that waits for one; equals take turns."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lanes: tuple[deque[tuple[float, Job]], ...] = tuple(deque() for _ in LANES)
        self._waiting: tuple[dict[Puller[Job], None], ...] = tuple({} for _ in range(_LEVELS))

    def publish(self, lane: str, job: Job) -> None:
        """A job has come to the broker."""
        number = LANES.index(lane)
        for level in self._waiting:
            for puller in level:
                puller.give(number, self._events.now, job)
                return
        self._lanes[number].append((self._events.now, job))

    def take(self, lane: int) -> tuple[float, Job] | None:
        """The oldest job of a lane, and when it was published."""
        return self._lanes[lane].popleft() if self._lanes[lane] else None

    def wait(self, puller: Puller[Job], level: int) -> None:
        """The next job that comes may be given to this one."""
        self._waiting[level][puller] = None

    def forget(self, puller: Puller[Job], level: int) -> None:
        """No more."""
        self._waiting[level].pop(puller, None)


class Puller(Generic[Job]):
    """One worker's way of taking jobs, as ``epd_common.bus.puller`` takes them.

    Two things are simpler here: to look into a lane takes no time, and who waits waits on all lanes.

    Args:
        waits_s: See :class:`LaneOrder`.
        slots: Jobs in work at once.
        ahead_s: See :class:`WorkAhead`.
        start: Begins a job; it is told when that was published.
        load: How loaded the worker is, from 0 to 9; by the number of its jobs, if it is not given.
    """

    def __init__(
        self,
        queue: Queue[Job],
        events: Events,
        *,
        waits_s: Sequence[float],
        slots: int,
        ahead_s: float,
        start: Callable[[Job, float], None],
        load: Callable[[], int] | None = None,
    ) -> None:
        self._queue = queue
        self._events = events
        self._order = LaneOrder(waits_s)
        self._work = WorkAhead(ahead_s, slots)
        self._start = start
        self._load = load or (lambda: load_level(self._work.busy))
        self._level = 0
        self._pull()

    def give(self, lane: int, published: float, job: Job) -> None:
        """A job came."""
        self._queue.forget(self, self._level)
        self._begin(lane, published, job)
        self._pull()

    def release(self) -> None:
        """A job is done."""
        self._queue.forget(self, self._level)
        self._work.ended(self._events.now)
        self._pull()

    def renew(self) -> None:
        """The load is another one."""
        if self._load() != self._level:
            self._queue.forget(self, self._level)
            self._pull()

    def _begin(self, lane: int, published: float, job: Job) -> None:
        self._order.took(lane, published=published, now=self._events.now)
        self._work.began(self._events.now)
        self._start(job, published)

    def _pull(self) -> None:
        while self._work.busy < self._work.most:
            for lane in self._order.order():
                if (found := self._queue.take(lane)) is not None:
                    self._begin(lane, *found)
                    break
                self._order.found_empty(lane, now=self._events.now)
            else:
                self._level = self._load()
                self._queue.wait(self, self._level)
                return
