"""Waiting for embeddings: subscribe, then check, then wait (invariant I1).

An event only wakes: what became of the item is read from its state, which is written before the event is
sent. So a late, doubled or forged event changes nothing. A slow re-check stands behind the events as a
belt. What is done about an item that fails, is lost on the way or does not come is the ``RescuePolicy``'s
to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import msgspec
from nats.aio.msg import Msg

from epd_common.bus import Bus
from epd_common.errors import EpdError, UnavailableError, UpstreamError
from epd_common.ingest.fitting import check_item_fits
from epd_common.orders import OrderContext, Orders, encode_job
from epd_common.protocol import EmbeddingEvent, Item, ProtocolError, decode, subjects
from epd_common.store import Claim, EmbeddingHeader, SizeTable
from epd_common.tasks import end, whole
from epd_common.telemetry.logs import log_about
from epd_pd.arrivals import Arrivals
from epd_pd.local_encode import LocalEncode
from epd_pd.pins import Pins
from epd_pd.rescue import RescuePolicy, Step
from epd_pd.waiting import Wait

logger = logging.getLogger(__name__)

ANNOUNCED_S = 0.25
"""So long after a state an event that tells of it may come."""

BACKOFF_S = 0.1
"""Pause before the third order of an item; each further one is longer by this."""


class Readiness:
    """Makes the embeddings of a request ready on this node.

    Args:
        sizes: Forecasts metadata, and learns from what comes.
        policy: What is done about items that do not come.
        local: Encodes here; None where this worker's engine cannot.
        encoders_alive: Whether anybody takes encode jobs of this model.
        recheck_s: Seconds between looks at the state while no event comes.
        store_patience_s: Seconds that an item is waited for while the store of states is away.
        max_item_rows: What the engine's encoder cache holds; an item with more is refused. 0: not known.
        counters: ``redelivered``, ``lost``, ``reordered``, ``encoded_here``, ``gave_up``, and ``found_*``: in
            which state items were found.
    """

    def __init__(
        self,
        bus: Bus,
        orders: Orders,
        pins: Pins,
        sizes: SizeTable,
        *,
        policy: RescuePolicy,
        local: LocalEncode | None,
        encoders_alive: Callable[[], bool],
        recheck_s: float,
        store_patience_s: float,
        counters: Counter[str],
        max_item_rows: int = 0,
    ) -> None:
        self._max_item_rows = max_item_rows
        self._bus = bus
        self._orders = orders
        self._pins = pins
        self._sizes = sizes
        self._policy = policy
        self._local = local
        self._encoders_alive = encoders_alive
        self._recheck_s = recheck_s
        self._store_patience_s = store_patience_s
        self._counters = counters

    @contextlib.asynccontextmanager
    async def arriving(
        self,
        items: Sequence[Item],
        context: OrderContext,
        media: Mapping[str, bytes] | None = None,
    ) -> AsyncIterator[Arrivals]:
        """The items on their way; each is pinned from its arrival until the context is left.

        ``media`` are the bytes of items of a raw modality, by key. What goes wrong with an item is the
        arrivals' ``failure``: an ``EpdError`` that names stage and key.
        """
        arrivals = Arrivals(items, media)
        taken: list[str] = []
        with self._pins.wanted([item.key for item in items]):
            waits = [
                asyncio.ensure_future(self._follow(index, arrivals, context, taken))
                for index in range(len(items))
            ]
            try:
                if items:
                    await self._forecast(items, arrivals)
                yield arrivals
            finally:
                try:
                    await end(*waits)
                finally:  # also where this is cancelled a second time
                    for key in taken:
                        self._pins.release(key)

    async def let_go(self, keys: Sequence[str], request_id: str) -> None:
        """The request has ended without them: what nobody else waits for need not be encoded."""
        await self._orders.let_go(keys, request_id)

    async def _forecast(self, items: Sequence[Item], arrivals: Arrivals) -> None:
        try:
            found = await self._sizes.look_up(items)
        except UnavailableError as error:  # the items may come all the same
            logger.warning("no sizes are known: %s", error)
            return
        for index, size in enumerate(found):
            if size is not None:
                arrivals.forecast(index, size.metadata)

    async def _follow(
        self, index: int, arrivals: Arrivals, context: OrderContext, taken: list[str]
    ) -> None:
        """Wait for one item; its arrival or failure is noted in ``arrivals``."""
        item = arrivals.items[index]
        log_about(key=item.key)  # a task of its own
        try:
            async with self._events(item.key) as events:
                wait = Wait(item, context, events, arrivals.marks[index])
                header = await self._until_pinned(wait, index, arrivals, taken)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the request's task raises it
            arrivals.fail(error)
            return
        try:
            check_item_fits(header.rows, f"items[{index}]", max_item_rows=self._max_item_rows)
        except EpdError as error:
            await self._note_size(item, header)  # the next one is refused before it is encoded
            arrivals.fail(error)
            return
        arrivals.arrive(index, header)
        await self._note_size(item, header)

    async def _note_size(self, item: Item, header: EmbeddingHeader) -> None:
        try:
            await self._sizes.add(
                item.modality,
                item.width,
                item.height,
                item.processor_args,
                header.metadata,
                header.rows,
            )
        except EpdError as error:
            logger.warning("size not noted: %s", error, extra={"key": item.key})

    async def _until_pinned(
        self, wait: Wait, index: int, arrivals: Arrivals, taken: list[str]
    ) -> EmbeddingHeader:
        """Wait until one item is pinned, which is noted in ``taken``; meanwhile do what the policy says."""
        key = wait.item.key
        wait.look(await self._look(wait))
        found = "unknown" if wait.away_since is not None else wait.claim.state
        self._counters[f"found_{found}"] += 1
        first_look = True
        while True:
            if wait.claim.event is not None and wait.claim.state != "failed":
                # Before the pin can be seen, which must fit the prompt.
                arrivals.forecast(index, wait.claim.event.metadata)
            away = wait.away_since is not None
            if wait.claim.state == "ready":
                wait.marks.note_ready(at_once=first_look)
            first_look = False
            if wait.claim.state == "ready" or away:
                places = wait.claim.event.locators if wait.claim.event is not None else ()
                header = await self._pins.take(key, locators=places, here_alone=away)
                if header is not None and wait.announced(header):
                    taken.append(key)
                    wait.marks.note_pinned(wait.claim.event, header, self._pins.source(key))
                    self._note_redelivery(wait)
                    return header
                if header is not None:
                    await self._drop(wait, header)
                if away:  # an encoder of this node may still bring it, and say so
                    wait.look(await self._next(wait, self._recheck_s))
                    continue
                self._counters["lost"] += 1
            situation = wait.situation(self._encoders_alive())
            arrivals.reasons[key] = wait.reason(situation)
            match self._policy.next(situation):
                case Step.WAIT:
                    wait.look(await self._next(wait, self._policy.look_again_s(situation)))
                case Step.ORDER:
                    wait.look(await self._order_again(wait))
                case Step.ENCODE_HERE:
                    wait.look(await self._encode_here(wait, arrivals.reasons[key]))
                case Step.GIVE_UP:
                    self._counters["gave_up"] += 1
                    raise wait.gave_up(situation)

    async def _look(self, wait: Wait) -> Claim:
        """The state; where its store is away for now what is known of it.

        Raises:
            UnavailableError: it is away for too long.
        """
        try:
            claim = await self._claim(wait, useless=0)
        except UnavailableError as error:
            now = time.monotonic()
            if wait.away_since is None:
                wait.away_since = now
                logger.warning("waiting without states: %s", error, extra=wait.fields())
            if now - wait.away_since >= self._store_patience_s:
                raise
            return wait.claim
        wait.away_since = None
        return claim

    async def _claim(self, wait: Wait, *, useless: int) -> Claim:
        """Look the state up, and order the encode if nobody has or makes the embedding."""
        item = wait.item
        (claim,) = await self._orders.claim([item], wait.context, useless={item.key: useless})
        if claim.state == "claimed":
            # Also where this request ends meanwhile: others may have joined, and wait for that job.
            await whole(self._orders.publish_encodes([item], [claim], wait.context))
        return claim

    async def _order_again(self, wait: Wait) -> Claim:
        await asyncio.sleep(BACKOFF_S * (wait.orders - 1))
        wait.orders += 1
        wait.marks.rescue = "ordered"
        self._counters["reordered"] += 1
        logger.warning(
            "embedding %s; ordered again",
            wait.trouble,
            extra=wait.fields() | {"orders": wait.orders},
        )
        return await self._claim(wait, useless=wait.claim.epoch)

    async def _encode_here(self, wait: Wait, reason: str) -> Claim:
        """Take the item over from whoever was to encode it."""
        assert self._local is not None
        key = wait.item.key
        (claim,) = await self._orders.claim(
            [wait.item], wait.context, useless={key: wait.claim.epoch}, rescue=True
        )
        if claim.state != "claimed":
            return claim  # another has taken it over
        self._counters["encoded_here"] += 1
        wait.marks.rescue = "local"
        logger.warning("encoding an item here: %s", reason, extra=wait.fields())
        job = encode_job(wait.item, claim.epoch, wait.context)
        event = await self._local.encode(job, within_s=self._policy.deadline_s - wait.total_s)
        if event is None:
            return await self._claim(wait, useless=0)
        wait.tried_here = event.state != "ready"
        return Claim("ready" if event.state == "ready" else "failed", event.epoch, event)

    async def _next(self, wait: Wait, at_most_s: float) -> Claim:
        """The state after the next event, or after a look when none came for a while."""
        within_s = min(self._recheck_s, max(at_most_s, 0.001))
        if wait.context.deadline:
            left_s = wait.context.deadline - time.time()
            if left_s <= 0:
                raise wait.late()
            within_s = min(within_s, left_s)
        event = await _within(within_s, wait.events)
        try:
            found = await self._orders.state(wait.item)
        except UnavailableError:
            claim = await self._look(wait)
            # What comes with it is verified before it is used.
            came = event is not None and event.state == "ready" and event.epoch >= claim.epoch
            return Claim("ready", event.epoch, event) if event is not None and came else claim
        if found is None:
            return await self._forgotten(wait, event)
        if event is None or found.epoch < wait.claim.epoch:
            return await self._look(wait)  # its lease may be over
        return found

    async def _forgotten(self, wait: Wait, event: EmbeddingEvent | None) -> Claim:
        """What became of an item whose state is gone.

        Failures that need not come again are not remembered, and told right behind. All others are, so this
        is none of them, whatever an event says.
        """
        if event is None or event.state != "failed":
            event = await _within(ANNOUNCED_S, wait.events)
        if event is not None and event.state == "failed" and event.epoch >= wait.claim.epoch:
            passing = msgspec.structs.replace(event, status=max(event.status, UpstreamError.status))
            return Claim("failed", wait.claim.epoch, passing)
        wait.orders += 1  # looked up below, it is ordered anew
        return await self._look(wait)

    async def _drop(self, wait: Wait, header: EmbeddingHeader) -> None:
        """Forget an embedding that is not the one that was announced."""
        logger.warning(
            "an embedding of %d rows with %s is not what was announced; dropped",
            header.rows,
            header.metadata,
            extra=wait.fields(),
        )
        self._counters["integrity_faults"] += 1
        self._pins.release(wait.item.key)
        await self._pins.forget(wait.item.key)

    def _note_redelivery(self, wait: Wait) -> None:
        event = wait.claim.event
        if event is not None and event.attempt > 1:
            self._counters["redelivered"] += 1
            logger.info("item was encoded at attempt %d", event.attempt, extra=wait.fields())

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

        async with self._bus.listening(subjects.ready_subject(key), on_event):
            await self._bus.flush()  # the server knows of it before the check
            yield events


async def _within(seconds: float, events: asyncio.Queue[EmbeddingEvent]) -> EmbeddingEvent | None:
    """What the next events say, if any comes in time: of several, that it failed, else the first."""
    try:
        async with asyncio.timeout(seconds):
            event = await events.get()
    except TimeoutError:
        return None
    while not events.empty():  # one look tells of all
        later = events.get_nowait()
        event = later if later.state == "failed" else event
    return event
