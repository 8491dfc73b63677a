"""Whether a decode worker may believe the keys and values that a prefill worker left.

They are read from that worker's memory without its doing anything, so nothing says that it still keeps them
while they are read: after its lease they may be another prompt's. So an answer is believed only if its first
token comes within the lease, by this worker's clock from when the job was published, and what comes later is
computed here from the embeddings, as if nothing had been handed over. A job that is delivered again is not
tried at all: the attempt before may have had its prefill worker forget what it had read.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from functools import partial

from epd_common.engines import AnswerPart, KvHandle, KvLostError, Loaded, PdEngine, Placeholder
from epd_common.ingest.pipeline import Prepared
from epd_common.protocol import Handover
from epd_common.tasks import end
from epd_pd.attempt import Attempt
from epd_pd.metrics import PdMetrics
from epd_pd.sending import send

logger = logging.getLogger(__name__)

CLOCKS_S = 2.0
"""By so much the clocks of broker and workers may differ."""

LOOK_S = 0.25


def believable_s(handover: Handover | None, *, delivered: int, queued_s: float) -> float:
    """Seconds within which the first token must come; 0 or less: it is not tried. Pure policy.

    Args:
        delivered: How often the decode job was delivered, this time included.
        queued_s: How long ago it was published.
    """
    if handover is None or delivered > 1:
        return 0.0
    return handover.lease_s - CLOCKS_S - queued_s


class Loading:
    """Answers what a prefill worker has handed over.

    Args:
        prefill_alive: Whether the prefill worker of this id lives.
        counters: ``kv_loaded``, ``kv_lost``, ``loaded_tokens``.
    """

    def __init__(
        self,
        engine: PdEngine,
        *,
        prefill_alive: Callable[[str], bool],
        metrics: PdMetrics,
        counters: Counter[str],
    ) -> None:
        self._engine = engine
        self._prefill_alive = prefill_alive
        self._metrics = metrics
        self._counters = counters

    async def answer(
        self, attempt: Attempt, prepared: Prepared, media: Mapping[str, bytes]
    ) -> bool:
        """Send the whole answer; False where nothing was handed over, or nothing that can be believed. Then
        nothing was sent.

        Args:
            media: Of those items that vLLM wants to see itself.
        """
        handover = attempt.job.handover
        if handover is None:
            return False
        within_s = believable_s(handover, delivered=attempt.delivered, queued_s=attempt.queued_s)
        try:
            if within_s <= 0 or len(handover.metadata) != len(prepared.items):
                raise KvLostError("the job was delivered before, or lay in the queue for too long")
            await self._answer(attempt, handover, prepared, media, within_s)
        except KvLostError as error:
            self._counters["kv_lost"] += 1
            attempt.trail.loaded = None
            logger.warning(
                "prefilling a prompt anew: %s", error, extra=attempt.log_fields | error.fields()
            )
            return False
        return True

    async def _answer(
        self,
        attempt: Attempt,
        handover: Handover,
        prepared: Prepared,
        media: Mapping[str, bytes],
        within_s: float,
    ) -> None:
        loaded = attempt.trail.loaded = Loaded()
        attempt.trail.prepared([], [])
        attempt.trail.entered()
        answer = self._engine.answer(
            attempt.job.request_id,
            attempt.job.route,
            # There is nothing to prefill: no reason to wait behind what came before. The engine puts its own
            # parts into the body, which may be needed once more.
            copy.deepcopy(prepared.body) | {"priority": attempt.job.priority},
            [
                Placeholder(item.key, item.modality, metadata, media.get(item.key))
                for item, metadata in zip(prepared.items, handover.metadata, strict=True)
            ],
            traceparent=attempt.traceparent,
            kv=KvHandle(handover.params),
            loaded=loaded,
        )
        alive = partial(self._prefill_alive, handover.worker)
        async with contextlib.aclosing(answer):
            parts = in_time(answer, within_s=within_s, alive=alive)
            await send(attempt, self._engine, parts, arrivals=None, metrics=self._metrics)
        self._counters["kv_loaded"] += 1
        self._counters["loaded_tokens"] += loaded.loaded_tokens


async def in_time(
    answer: AsyncGenerator[AnswerPart, None], *, within_s: float, alive: Callable[[], bool]
) -> AsyncIterator[AnswerPart]:
    """The parts of an answer, if the first one comes in time.

    Args:
        within_s: See :func:`believable_s`.
        alive: Whether the prefill worker is.

    Raises:
        KvLostError: before the first part.
    """
    until = time.monotonic() + within_s
    first = asyncio.ensure_future(anext(answer))
    try:
        while not first.done():
            if not alive():
                raise KvLostError("the prefill worker is gone")
            if time.monotonic() >= until:
                raise KvLostError("the prompt was not there before its lease was over")
            await asyncio.wait((first,), timeout=LOOK_S)
        part = first.result()
        if time.monotonic() >= until:
            raise KvLostError("the prompt was there only after its lease was over")
    finally:
        await end(first)
    yield part
    async for part in answer:
        yield part
