"""From an engine's parts to frames."""

from __future__ import annotations

from collections.abc import AsyncIterator

from epd_common.engines import AnswerHead, AnswerPart, KvHandle, PdEngine
from epd_common.errors import EpdError, UpstreamError
from epd_pd.arrivals import Arrivals
from epd_pd.attempt import Attempt
from epd_pd.metrics import PdMetrics


async def send(
    attempt: Attempt,
    engine: PdEngine,
    parts: AsyncIterator[AnswerPart],
    *,
    arrivals: Arrivals | None,
    metrics: PdMetrics,
) -> KvHandle | None:
    """Send what the engine says. The handle, if it says that it has prefilled for others.

    Args:
        arrivals: What the request waits for; where that has failed nothing more is sent.

    Raises:
        UpstreamError: the engine died.
    """
    writer, begun = attempt.writer, False
    writer.rewind()
    async for part in parts:
        if arrivals is not None and arrivals.failure is not None:
            return None  # what the engine says of a missing or unfit item is not the answer
        _require_alive(engine)  # what it says of its death is not, either
        if isinstance(part, KvHandle):
            return part
        if isinstance(part, AnswerHead):
            await writer.head(part.status, part.content_type)
            continue
        if not begun:
            begun = True
            metrics.first_data(arrivals)
        attempt.share.prefilled()
        attempt.trail.answered()
        await writer.data(part)
    _require_alive(engine)
    await writer.end()
    return None


def _require_alive(engine: PdEngine) -> None:
    if not engine.alive:
        raise UpstreamError("the engine died while it answered", stage="generate")


async def once_known(
    answer: AsyncIterator[AnswerPart], arrivals: Arrivals
) -> AsyncIterator[AnswerPart]:
    """The parts of an answer; a refusal only once all items are here.

    Before that it may be due to a forecast that is wrong, which then is the arrivals' failure.
    """
    try:
        async for part in answer:
            if isinstance(part, AnswerHead) and part.status >= 400:
                await arrivals.settled()
            yield part
    except EpdError:
        raise
    except Exception:
        await arrivals.settled()
        if arrivals.failure is None:
            raise
