"""Tells who places requests what the engine's prefix cache holds: at once what changed, now and then all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

from epd_common.bus import Bus
from epd_common.changes import Changes
from epd_common.errors import EpdError
from epd_common.held_index import BEAT_S, WHOLE_S
from epd_common.kept import Kept
from epd_common.protocol import Held, subjects
from epd_common.tasks import end

logger = logging.getLogger(__name__)

GATHER_S = 0.1
"""Changes within this time are one message."""


class Teller:
    """Makes the messages of one worker; what was not sent makes the next one a whole one. No I/O.

    Args:
        epoch: Start of the process, in milliseconds since the Unix epoch.
    """

    def __init__(self, kept: Kept, *, worker: str, epoch: int) -> None:
        self._kept = kept
        self._worker = worker
        self._epoch = epoch
        self._seq = 0
        self._whole_at = 0.0
        self._connection = -1

    def next(self, now: float, connection: int) -> Held:
        """The next message.

        Args:
            now: Monotonic seconds.
            connection: Number of the connection that it goes out on; what was sent on another may be lost.
        """
        added, gone = self._kept.take()
        whole = now >= self._whole_at or connection != self._connection
        if whole:
            self._whole_at = now + WHOLE_S
            self._connection = connection
            added, gone = sorted(self._kept.keys), []
        told = Held(
            worker=self._worker,
            epoch=self._epoch,
            seq=self._seq,
            whole=whole,
            keys=added,
            gone=gone,
        )
        self._seq += 1
        return told

    def not_sent(self) -> None:
        """The latest message did not go out."""
        self._whole_at = 0.0


@contextlib.asynccontextmanager
async def telling_what_is_held(bus: Bus, kept: Kept, *, worker: str) -> AsyncIterator[None]:
    """Tell while the context is open."""
    task = asyncio.create_task(_tell(bus, kept, worker), name="telling what is held")
    try:
        yield
    finally:
        await end(task)


async def _tell(bus: Bus, kept: Kept, worker: str) -> None:
    changes = Changes()
    kept.changed = changes.note
    teller = Teller(kept, worker=worker, epoch=time.time_ns() // 1_000_000)
    while True:
        seen = changes.count
        try:
            told = teller.next(time.monotonic(), bus.reconnects)
            await bus.emit(subjects.held_subject(worker), told)
        except EpdError as error:
            logger.debug("what is held could not be told: %s", error)
            teller.not_sent()
        await asyncio.sleep(GATHER_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S - GATHER_S):
                await changes.since(seen)
