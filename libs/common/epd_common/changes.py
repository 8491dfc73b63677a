"""Waiting for changes of a state that several tasks look at, without missing one."""

from __future__ import annotations

import asyncio


class Changes:
    """Counts changes. Who waits says up to which count he has looked:

        while True:
            seen = changes.count
            if ...:  # look at the state
                return
            await changes.since(seen)

    An ``asyncio.Event`` that is cleared before each wait cannot do that for more than one task: the second
    clear takes the first task's wake-up away.
    """

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def note(self) -> None:
        """Something changed."""
        self.count += 1
        changed, self._next = self._next, asyncio.Event()
        changed.set()

    async def since(self, seen: int) -> None:
        """Return when the count is beyond ``seen``."""
        while self.count == seen:
            await self._next.wait()
