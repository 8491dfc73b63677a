"""Places that tenants take in turn, so that nobody waits behind another's crowd.

A place goes round among the tenants that wait; within a tenant, who came first is first. Where there are
several tenants each holds at most a share of the places, whether others wait or not: a place cannot be
taken back, so one has to be free before somebody else comes.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

Waiter = TypeVar("Waiter")


class LineFullError(Exception):
    """As many wait as may; the text says how many."""


class Turns(Generic[Waiter]):
    """Whose turn it is. Pure; :class:`FairPlaces` waits.

    Args:
        places: How many there are.
        share: Of these, what one tenant may hold.
        line: Who may wait, of all tenants together; of one tenant half as many.
        several: Whether there are tenants to protect from each other; without them one may have everything.
    """

    def __init__(
        self, places: int, *, share: int, line: int, several: Callable[[], bool] = lambda: False
    ) -> None:
        self._free = places
        self._share = share
        self._line = line
        self._several = several
        self._held: Counter[str] = Counter()
        self._lines: dict[str, deque[Waiter]] = {}
        """By tenant, in the order of their turns. None of them is empty."""

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(map(len, self._lines.values()))

    def join(self, tenant: str, waiter: Waiter) -> None:
        """Stand in line; :meth:`admit` says when the turn has come.

        Raises:
            LineFullError: too many wait, and there is no place that this one could have at once.
        """
        if not self._has_place_for(tenant):
            own = len(self._lines.get(tenant, ()))
            if self.waiting >= self._line:
                raise LineFullError(str(self.waiting))
            if self._several() and own >= max(1, self._line // 2):
                raise LineFullError(str(own))
        self._lines.setdefault(tenant, deque()).append(waiter)

    def leave(self, tenant: str, waiter: Waiter) -> bool:
        """Wait no longer; False for one that does not wait, as it was admitted."""
        line = self._lines.get(tenant)
        if line is None or waiter not in line:
            return False
        line.remove(waiter)
        if not line:
            del self._lines[tenant]
        return True

    def admit(self) -> Waiter | None:
        """The next that has a place from now on, if there is one."""
        for tenant, line in self._lines.items():
            if self._has_place_for(tenant):
                waiter = line.popleft()
                del self._lines[tenant]
                if line:
                    self._lines[tenant] = line  # behind all others
                self._free -= 1
                self._held[tenant] += 1
                return waiter
        return None

    def give_back(self, tenant: str) -> None:
        """One place of this tenant's is free again."""
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]

    def _has_place_for(self, tenant: str) -> bool:
        return self._free > 0 and (self._held[tenant] < self._share or not self._several())


class FairPlaces:
    """Places for coroutines of one event loop; see :class:`Turns` for the arguments."""

    def __init__(
        self, places: int, *, share: int, line: int, several: Callable[[], bool] = lambda: False
    ) -> None:
        self._turns: Turns[asyncio.Future[None]] = Turns(
            places, share=share, line=line, several=several
        )

    async def take(self, tenant: str) -> None:
        """Wait for a place, which :meth:`give_back` must be called for.

        Raises:
            LineFullError: too many wait.
        """
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.join(tenant, place)
        self._admit()
        try:
            await place
        except BaseException:
            if not self._turns.leave(tenant, place):
                self.give_back(tenant)  # it came at the same moment
            raise

    def give_back(self, tenant: str) -> None:
        """Free a place of this tenant's for the next."""
        self._turns.give_back(tenant)
        self._admit()

    def _admit(self) -> None:
        while (place := self._turns.admit()) is not None:
            if not place.done():  # one that is cancelled gives back what it got
                place.set_result(None)
