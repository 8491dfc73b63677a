"""When a request enters the engine: all its items' metadata are known, and there is something to prefill.

A request whose embeddings are not all there occupies a slot of the engine while it waits. So only some may
be inside at a time, fewer than the engine runs, and the rest wait outside; those that are complete, and
text-only ones, are never behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from epd_common.changes import Changes
from epd_common.early import may_enter_early
from epd_common.ingest.body import RESPONSES
from epd_common.ingest.contents import parts_of
from epd_common.ingest.parts import text_of
from epd_common.tasks import end
from epd_pd.arrivals import Arrivals


def may_enter(arrivals: Arrivals, text_before: int) -> bool:
    """Whether an incomplete request has something to prefill. Pure policy."""
    return may_enter_early(
        sized=arrivals.sized, first_is_here=arrivals.first_is_here, text_before=text_before
    )


def text_before_first_item(route: str, body: dict[str, Any]) -> int:
    """Characters of a prepared body's contents that stand before its first media reference."""
    instructions = body.get("instructions") if route == RESPONSES else ""
    characters = len(instructions) if isinstance(instructions, str) else 0
    for part in parts_of(route, body):
        if isinstance(part, dict) and part.get("type") == "media_ref":
            return characters
        characters += len(text_of(part))
    return characters


class Admission:
    """Lets requests into the engine.

    Args:
        max_incomplete: Requests inside that still wait for embeddings, at most; 0 holds every request
            outside until all its embeddings are there.
    """

    def __init__(self, max_incomplete: int) -> None:
        self._free = self._most = max_incomplete
        self._freed = Changes()
        self.entered_early = self.entered_complete = 0
        self.outside = 0
        """Requests that wait for embeddings, or for a slot, before they enter."""

    @property
    def inside(self) -> int:
        """Requests inside that still wait for embeddings."""
        return self._most - self._free

    @contextlib.asynccontextmanager
    async def enter(self, arrivals: Arrivals, text_before: int) -> AsyncIterator[None]:
        """Wait until the request may enter; its slot is given back when it is complete, or at the end.

        Raises:
            BaseException: the failure of an item.
        """
        self.outside += 1
        try:
            await self._wait(arrivals, text_before)
        finally:
            self.outside -= 1
        if arrivals.complete:
            self.entered_complete += 1
            yield
            return
        self._free -= 1
        self.entered_early += 1
        slot = contextlib.ExitStack()
        slot.callback(self._release)
        completing = asyncio.ensure_future(_close_when_complete(arrivals, slot))
        try:
            yield
        finally:
            with slot:  # closed also where this is cancelled a second time
                await end(completing)

    def _release(self) -> None:
        self._free += 1
        self._freed.note()

    async def _wait(self, arrivals: Arrivals, text_before: int) -> None:
        while True:
            arrived, freed = arrivals.changes.count, self._freed.count
            if arrivals.failure is not None:
                raise arrivals.failure
            if arrivals.complete or (self._free > 0 and may_enter(arrivals, text_before)):
                return
            waits = [
                asyncio.ensure_future(arrivals.changes.since(arrived)),
                asyncio.ensure_future(self._freed.since(freed)),
            ]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end(*waits)


async def _close_when_complete(arrivals: Arrivals, slot: contextlib.ExitStack) -> None:
    while True:
        seen = arrivals.changes.count
        if arrivals.complete:
            break
        await arrivals.changes.since(seen)
    slot.close()
