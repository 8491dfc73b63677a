"""Encoding an item on this worker's own engine, where the encoders fail."""

from __future__ import annotations

import asyncio

from epd_common.encode import Encoding
from epd_common.errors import DeadlineError, EpdError
from epd_common.protocol import EmbeddingEvent, EncodeJob
from epd_common.store import KeyStates

AT_ONCE = 4
"""Items in work at once; each holds its media in memory and a sequence of the engine."""


class LocalEncode:
    """Does a claimed encode job here, and announces it like any encoder."""

    def __init__(self, encoding: Encoding, states: KeyStates) -> None:
        self._encoding = encoding
        self._states = states
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def encode(self, job: EncodeJob, *, within_s: float) -> EmbeddingEvent | None:
        """The event that everybody was told; None if a newer epoch of the key is under way."""
        try:
            async with asyncio.timeout(max(within_s, 0.0)), self._slots:
                event = await self._encoding.make(job)
        except TimeoutError:
            late = DeadlineError(
                f"this worker's engine did not encode item {job.key} in time",
                stage="encode",
                key=job.key,
            )
            event = self._encoding.failure(job, late)
        except EpdError as error:
            event = self._encoding.failure(job, await self._encoding.judge(job, error))
        except BaseException:  # cancelled with its request, and others may wait for the same item
            await self._states.abandon(job.key, job.epoch)
            raise
        if event is not None:
            await self._encoding.announce(event)
        return event
