"""Whether a decode worker may believe the keys and values that a prefill worker left.

They are read from that worker's memory without its doing anything, so nothing says that it still keeps them
while they are read: after its lease they may be another prompt's. So an answer is believed only if its first
token comes within the lease, by this worker's clock from when the job was published, and what comes later is
computed here from the embeddings, as if nothing had been handed over. A job that is delivered again is not
tried at all: the attempt before may have had its prefill worker forget what it had read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from epd_common.engines import AnswerPart, KvLostError
from epd_common.protocol import Handover
from epd_common.tasks import end

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
    """Follows one answer until its first part has come in time, or it is given up.

    Args:
        answer: The engine's, with the handover.
        within_s: See :func:`believable_s`.
        alive: Whether the prefill worker is.
    """

    def __init__(
        self,
        answer: AsyncGenerator[AnswerPart, None],
        *,
        within_s: float,
        alive: Callable[[], bool],
    ) -> None:
        self._answer = answer
        self._until = time.monotonic() + within_s
        self._alive = alive

    async def parts(self) -> AsyncIterator[AnswerPart]:
        """The parts of the answer.

        Raises:
            KvLostError: before the first one; the answer is given up.
        """
        first = asyncio.ensure_future(anext(self._answer))
        try:
            while not first.done():
                if not self._alive():
                    raise KvLostError("the prefill worker is gone")
                if time.monotonic() >= self._until:
                    raise KvLostError("the prompt was not there before its lease was over")
                await asyncio.wait((first,), timeout=LOOK_S)
            part = first.result()
            if time.monotonic() >= self._until:
                raise KvLostError("the prompt was there only after its lease was over")
        finally:
            await end(first)
        yield part
        async for part in self._answer:
            yield part
