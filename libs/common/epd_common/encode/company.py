"""Who is in an engine beside whom."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from epd_common.changes import Changes


@dataclass(slots=True, eq=False)
class Stay:
    """An item in the engine. ``alone``: nothing else is, or was when the engine died."""

    alone: bool = True


class Company:
    """Lets items into an engine, and one that must be alone only when it is empty.

    While one waits for that, nobody else is let in: it would wait for ever.

    Args:
        alive: Whether the engine lives.
    """

    def __init__(self, alive: Callable[[], bool]) -> None:
        self._alive = alive
        self._inside: set[Stay] = set()
        self._closed = 0
        self._changes = Changes()

    @contextlib.asynccontextmanager
    async def enter(self, *, alone: bool) -> AsyncIterator[Stay]:
        """Be in the engine, as soon as one may."""
        stay = Stay()
        self._closed += alone
        try:
            await self._until_let_in(alone)
            self._inside.add(stay)
            self._look()
            yield stay
        finally:
            self._closed -= alone
            self._inside.discard(stay)
            self._look()
            self._changes.note()

    async def _until_let_in(self, alone: bool) -> None:
        while True:
            seen = self._changes.count
            if not self._inside if alone else not self._closed:
                return
            await self._changes.since(seen)

    def _look(self) -> None:
        if not self._alive():  # who was beside whom when it died is to be seen later
            return
        for stay in self._inside:
            stay.alone = len(self._inside) == 1
