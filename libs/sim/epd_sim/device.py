"""The one thing that a simulated engine computes on, in simulated time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

CATCH_UP_S = 0.02
"""Seconds of oversleeping that are made up for, at most. Timers are late by up to a millisecond, much of a
step; what a machine without a free core loses beyond that is lost."""

Sleep = Callable[[float], Awaitable[None]]
"""Lets seconds pass."""


class PunctualSleep:
    """Sleeps in real time; what one sleep took too long the next ones are shorter by."""

    def __init__(self) -> None:
        self._late_s = 0.0

    async def __call__(self, seconds: float) -> None:
        began = time.monotonic()
        await asyncio.sleep(max(0.0, seconds - self._late_s))
        late_s = self._late_s + time.monotonic() - began - seconds
        self._late_s = min(max(0.0, late_s), CATCH_UP_S)


class Device:
    """Computes one thing after another, in the order in which they were asked for.

    Args:
        slow_factor: Everything takes so many times as long.
    """

    def __init__(self, sleep: Sleep, *, slow_factor: float = 1.0) -> None:
        self._sleep = sleep
        self._slow_factor = slow_factor
        self._free = asyncio.Lock()
        self.computed = 0

    async def wait(self, seconds: float) -> None:
        """Let so long pass beside whatever is computed."""
        await self._sleep(seconds * self._slow_factor)

    async def compute(self, seconds: float) -> None:
        """Be busy for so long."""
        async with self._free:
            await self._sleep(seconds * self._slow_factor)
            self.computed += 1
