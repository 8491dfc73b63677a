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
from epd_common.errors import DeadlineError, EpdError, UpstreamError, from_status
from epd_common.orders import OrderContext, Orders
from epd_common.protocol import EmbeddingEvent, Item, ProtocolError, decode, subjects
from epd_common.store import Claim, EmbeddingHeader, SizeTable
from epd_common.store.states import OTHERS_MAY_SUCCEED
from epd_common.tasks import end
from epd_pd.arrivals import Arrivals
from epd_pd.pins import Pins

logger = logging.getLogger(__name__)

BACKOFF_S = 0.1
"""Pause before the third order of an item; each further one is longer by this."""


class Readiness:
    """Makes the embeddings of a request ready on this node.

    Args:
        sizes: Forecasts metadata, and learns from what comes.
        attempts: Times an item is ordered in all on behalf of one request.
        recheck_s: Seconds between looks at the state while no event comes.
    """

    def __init__(
        self,
        bus: Bus,
        orders: Orders,
        pins: Pins,
        sizes: SizeTable,
        *,
        attempts: int,
        recheck_s: float,
        counters: Counter[str],
    ) -> None:
        self._bus = bus
        self._orders = orders
        self._pins = pins
        self._sizes = sizes
        self._attempts = attempts
        self._recheck_s = recheck_s
        self._counters = counters

    @contextlib.asynccontextmanager
    async def arriving(
        self, items: Sequence[Item], context: OrderContext
    ) -> AsyncIterator[Arrivals]:
        """The items on their way; each is pinned from its arrival until the context is left.

        What goes wrong with an item is the arrivals' ``failure``: an ``EpdError`` that names stage and key.
        """
        arrivals = Arrivals(items)
        taken: list[str] = []
        waits = [
            asyncio.ensure_future(self._follow(index, arrivals, context, taken))
            for index in range(len(items))
        ]
        try:
            if items:
                for index, metadata in enumerate(await self._sizes.look_up(items)):
                    if metadata is not None:
                        arrivals.forecast(index, metadata)
            yield arrivals
        finally:
            await end(*waits)
            for key in taken:
                self._pins.release(key)

    async def _follow(
        self, index: int, arrivals: Arrivals, context: OrderContext, taken: list[str]
    ) -> None:
        """Wait for one item; its arrival or failure is noted in ``arrivals``."""
        item = arrivals.items[index]
        try:
            header = await self._one(item, index, arrivals, context, taken)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the request's task raises it
            arrivals.fail(error)
            return
        arrivals.arrive(index, header)
        try:
            await self._sizes.add(
                item.modality, item.width, item.height, item.processor_args, header.metadata
            )
        except EpdError as error:
            logger.warning("size not noted: %s", error, extra={"key": item.key})

    async def _one(
        self,
        item: Item,
        index: int,
        arrivals: Arrivals,
        context: OrderContext,
        taken: list[str],
    ) -> EmbeddingHeader:
        """Wait until one item is pinned, and note that in ``taken``."""
        async with self._events(item.key) as events:
            claim = await self._claim(item, context, useless=0)
            orders = 1
            while True:
                failure: EmbeddingEvent | None = None
                if claim.state == "ready":
                    if (
                        claim.event is not None
                    ):  # before the pin can be seen, which must fit the prompt
                        arrivals.forecast(index, claim.event.metadata)
                    header = await self._pins.take(item.key)
                    if header is not None:
                        taken.append(item.key)
                        return header
                    self._counters["lost"] += 1
                elif claim.state == "failed":
                    failure = claim.event
                else:
                    if claim.event is not None:
                        arrivals.forecast(index, claim.event.metadata)
                    event = await self._next(events, item.key, context.deadline)
                    if event is None or event.epoch < claim.epoch:
                        claim = await self._claim(item, context, useless=0)
                    elif event.state == "sized":
                        claim = Claim("pending", event.epoch, event)
                    else:
                        ready = event.state == "ready"
                        claim = Claim("ready" if ready else "failed", event.epoch, event)
                    continue
                if (failure is not None and _is_final(failure)) or orders >= self._attempts:
                    raise _gave_up(item.key, failure, orders)
                await asyncio.sleep(BACKOFF_S * (orders - 1))
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
        """The events of a key, from before this returns."""
        events: asyncio.Queue[EmbeddingEvent] = asyncio.Queue(maxsize=64)

        async def on_event(message: Msg) -> None:
            try:
                event = decode(message.data, EmbeddingEvent)
            except ProtocolError as error:
                logger.warning("dropping an event: %s", error, extra={"key": key})
                return
            if event.key == key and not events.full():
                events.put_nowait(event)

        subscription = await self._bus.subscribe(subjects.ready_subject(key), on_event)
        try:
            await self._bus.flush()  # the server knows of it before the check
            yield events
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()


def _is_final(failure: EmbeddingEvent) -> bool:
    """Whether these bytes can never be encoded. Another's job may have lacked them: ours has them."""
    return failure.status < 500 and failure.code not in OTHERS_MAY_SUCCEED


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
