"""What an encoder does with the messages of its queue: make the embedding, announce, acknowledge."""

from __future__ import annotations

import logging
import time
from collections import Counter

import msgspec

from epd_common.bus import Delivery
from epd_common.deadlines import bounded
from epd_common.encode.work import Encoding
from epd_common.errors import DeadlineError, EpdError, UnavailableError
from epd_common.protocol import EncodeJob, ProtocolError, decode
from epd_common.protocol.keys import is_key

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 0.2
MAX_AGE_S = 600.0
"""No encode is worth more than this, from its order on: for jobs that have no deadline, or one far off."""

EPOCH_AHEAD_S = 86_400.0
"""An epoch is a time in milliseconds; clocks may differ by so much."""


class EncodeHandler:
    """Handles encode jobs; many at once, so that the engine can batch them.

    Args:
        counters: ``failed``, ``retried``, ``dropped``, beside those of :class:`Encoding`.
    """

    def __init__(self, encoding: Encoding, counters: Counter[str]) -> None:
        self._encoding = encoding
        self._counters = counters

    async def handle(self, delivery: Delivery) -> None:
        """Do one job and settle its delivery."""
        try:
            job = decode(delivery.data, EncodeJob)
            if not is_key(job.key):  # it becomes a subject and a file name
                raise ProtocolError(f"'key' is no embedding key: {job.key[:80]!r}")
            if not 0 <= job.epoch <= (time.time() + EPOCH_AHEAD_S) * 1000:
                # It would stand above all that come after it.
                raise ProtocolError(f"'epoch' is none that anybody can have claimed: {job.epoch}")
        except ProtocolError as error:
            logger.error("malformed encode job: %s", error)
            delivery.outcome = "malformed"
            await delivery.give_up(error)
            return
        due = bounded(job.deadline, published=delivery.published, limit_s=MAX_AGE_S)
        job = msgspec.structs.replace(job, deadline=due)
        async with delivery:
            try:
                event = await self._encoding.make(
                    job,
                    sequence=delivery.sequence,
                    attempt=delivery.attempt,
                    queued_s=delivery.queued_s,
                )
            except EpdError as error:
                await self._failed(job, delivery, error)
                return
            # Written and verified; now announced, and only then acknowledged (invariant I2).
            delivery.outcome = "stale" if event is None else "ready"
            if event is not None:
                await self._encoding.announce(event)
            await delivery.ack()

    async def exhausted(self, data: bytes, error: EpdError) -> None:
        """Tell who waits that nobody encodes this any more."""
        try:
            job = decode(data, EncodeJob)
        except ProtocolError:
            return
        await self._encoding.announce(self._encoding.failure(job, error))

    async def _failed(self, job: EncodeJob, delivery: Delivery, error: EpdError) -> None:
        fields = {"key": job.key, "request_id": job.request_id, "attempt": delivery.attempt}
        error = await self._encoding.judge(job, error)
        expired = isinstance(error, DeadlineError)
        permanent = error.status < 500 or expired
        if not permanent and not delivery.last_attempt:
            self._counters["retried"] += 1
            if isinstance(error, UnavailableError):
                raise error  # this worker's broker or store is away, perhaps not that of others
            logger.warning("encode failed, to be tried again: %s", error, extra=fields)
            await delivery.retry(RETRY_DELAY_S)
            return
        delivery.outcome = "dropped" if expired else "failed"
        self._counters[delivery.outcome] += 1
        logger.warning("encode failed: %s", error, extra=fields)
        await self._encoding.announce(self._encoding.failure(job, error, attempt=delivery.attempt))
        if permanent:
            await delivery.ack()
        else:
            await delivery.give_up(error)
