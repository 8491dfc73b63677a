"""The door of an encoder's tower: items wait there for their turn."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from epd_common.turns import Place, Turns


class TowerDoor:
    """Lets items in as :class:`epd_common.turns.Turns` says."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._waiting: dict[Place, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def arrived(self, sequence: int | None = None) -> Iterator[Visit]:
        """An item is here, and is going to be prepared.

        Args:
            sequence: Of its job in the queue, if it had one.
        """
        visit = Visit(self, self._turns.arrive(time.monotonic(), sequence=sequence))
        try:
            yield visit
        finally:
            visit.leave()

    async def enter(self, place: Place) -> None:
        """See :meth:`Visit.enter`."""
        self._turns.ready(place)
        waiting = self._waiting[place] = asyncio.get_running_loop().create_future()
        try:
            self._look()
            await waiting
        except asyncio.CancelledError:
            self.leave(place)
            raise
        finally:
            del self._waiting[place]

    def leave(self, place: Place) -> None:
        """See :meth:`Visit.leave`."""
        self._turns.leave(place)
        self._look()

    def _look(self) -> None:
        now = time.monotonic()
        for place in self._turns.let_in(now):
            if not self._waiting[place].done():  # else it is cancelled, and about to leave
                self._waiting[place].set_result(None)
        again_at = self._turns.again_at(now)
        if again_at is not None and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, again_at - now), self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look()


class Visit:
    """An item's way through the tower."""

    def __init__(self, door: TowerDoor, place: Place) -> None:
        self._door = door
        self._place = place

    async def enter(self) -> None:
        """It is prepared: wait for its turn."""
        await self._door.enter(self._place)

    def leave(self) -> None:
        """It is out of the tower, or will not go there; said twice is said once."""
        self._door.leave(self._place)
