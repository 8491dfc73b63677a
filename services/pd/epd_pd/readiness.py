"""Waiting for embeddings: subscribe, then check, then wait (invariant I1).

A slow re-check stands behind the events as a belt. An item that fails or is lost on the way is ordered
again, a bounded number of times, before its request ends with an error that names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import nats.errors
from nats.aio.msg import Msg

from epd_common.bus import Bus
from epd_common.errors import DeadlineError, UpstreamError, from_status
from epd_common.orders import OrderContext, Orders
from epd_common.protocol import EmbeddingEvent, Item, ProtocolError, decode, subjects
from epd_common.store import Claim, EmbeddingHeader
from epd_common.tasks import end
from epd_pd.pins import Pins

logger = logging.getLogger(__name__)


class Readiness:
    """Makes the embeddings of a request ready on this node.

    Args:
        attempts: Times an item is ordered in all on behalf of one request.
        recheck_s: Seconds between looks at the state while no event comes.
    """

    def __init__(
        self,
        bus: Bus,
        orders: Orders,
        pins: Pins,
        *,
        attempts: int,
        recheck_s: float,
        counters: Counter[str],
    ) -> None:
        self._bus = bus
        self._orders = orders
        self._pins = pins
        self._attempts = attempts
        self._recheck_s = recheck_s
        self._counters = counters

    @contextlib.asynccontextmanager
    async def pinned(
        self, items: Sequence[Item], context: OrderContext
    ) -> AsyncIterator[list[EmbeddingHeader]]:
        """The headers of all items, pinned for as long as the context is open.

        Raises:
            EpdError: an item cannot be encoded, or the deadline passed; it names stage and key.
        """
        taken: list[str] = []
        waits = [asyncio.ensure_future(self._one(item, context, taken)) for item in items]
        try:
            if waits:
                # Not `gather`, which a cancel does not end before all of them have heeded it.
                await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
            yield [wait.result() for wait in waits if wait.done()]  # or raise the failure
        finally:
            await end(*waits)
            await asyncio.gather(*waits, return_exceptions=True)  # failures after the first
            for key in taken:
                self._pins.release(key)

    async def _one(self, item: Item, context: OrderContext, taken: list[str]) -> EmbeddingHeader:
        """Wait until one item is pinned, and note that in ``taken``."""
        async with self._events(item.key) as events:
            claim = await self._claim(item, context, useless=0)
            orders = 1
            while True:
                failure: EmbeddingEvent | None = None
                if claim.state == "ready":
                    header = await self._pins.take(item.key)
                    if header is not None:
                        taken.append(item.key)
                        return header
                    self._counters["lost"] += 1
                elif claim.state == "failed":
                    failure = claim.event
                else:
                    event = await self._next(events, item.key, context.deadline)
                    if event is not None and event.epoch >= claim.epoch:
                        ready = event.state == "ready"
                        claim = Claim("ready" if ready else "failed", event.epoch, event)
                    else:
                        claim = await self._claim(item, context, useless=0)
                    continue
                if (failure is not None and failure.status < 500) or orders >= self._attempts:
                    raise _gave_up(item.key, failure, orders)
                orders += 1
                self._counters["reordered"] += 1
                logger.warning(
                    "embedding %s; ordered again",
                    f"failed: {failure.reason}" if failure else "is in no store",
                    extra={"key": item.key, "request_id": context.request_id, "orders": orders},
                )
                claim = await self._claim(item, context, useless=claim.epoch)

    async def _claim(self, item: Item, context: OrderContext, *, useless: int) -> Claim:
        """Look the state up, and order the encode if nobody has or makes the embedding."""
        (claim,) = await self._orders.claim([item], useless={item.key: useless})
        if claim.state == "claimed":
            await self._orders.publish_encodes([item], [claim], context)
        return claim

    async def _next(
        self, events: asyncio.Queue[EmbeddingEvent], key: str, deadline: float
    ) -> EmbeddingEvent | None:
        """The next event; None when it is time to look at the state."""
        left = deadline - time.time() if deadline else self._recheck_s
        if left <= 0:
            raise DeadlineError(
                f"the deadline passed while item {key} was being encoded", stage="encode", key=key
            )
        try:
            async with asyncio.timeout(min(left, self._recheck_s)):
                return await events.get()
        except TimeoutError:
            return None

    @contextlib.asynccontextmanager
    async def _events(self, key: str) -> AsyncIterator[asyncio.Queue[EmbeddingEvent]]:
        """Ready and failed events of a key, from before this returns."""
        events: asyncio.Queue[EmbeddingEvent] = asyncio.Queue(maxsize=64)

        async def on_event(message: Msg) -> None:
            try:
                event = decode(message.data, EmbeddingEvent)
            except ProtocolError as error:
                logger.warning("dropping an event: %s", error, extra={"key": key})
                return
            if event.key == key and event.state != "sized" and not events.full():
                events.put_nowait(event)

        subscription = await self._bus.subscribe(subjects.ready_subject(key), on_event)
        try:
            await self._bus.flush()  # the server knows of it before the check
            yield events
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()


def _gave_up(key: str, failure: EmbeddingEvent | None, orders: int) -> Exception:
    if failure is not None and failure.status < 500:
        return from_status(
            failure.status, failure.reason, code=failure.code, stage="encode", key=key
        )
    reason = failure.reason if failure is not None else "its embedding was lost from every store"
    return UpstreamError(
        f"item {key} could not be encoded in {orders} attempts: {reason}",
        code="encode_failed",
        stage="encode",
        key=key,
    )
