"""What became of the latest requests of this gateway: for the page, ``epd explain`` and people who ask why.

All times of a trail are seconds since the request's arrival, by this gateway's clock. What the PD worker's
receipt says is moved to it by when the job was published here and how long it was queued there. Where a
prefill worker's is in it, that one is moved so, and the decode job was published when it ended.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any, NamedTuple

from epd_common.errors import EpdError
from epd_common.protocol import Item, ItemReceipt, Receipt
from epd_common.replies import Reply
from epd_common.requester import ItemOrigin, SentRequest
from epd_gateway.credible import credible

logger = logging.getLogger(__name__)

KEPT = 500
"""Requests that are remembered, the latest."""

LONGEST = 1000
"""Characters of what is remembered of an error, each part."""

SHORT_ITEMS = 8
"""Items of a trail that is told in a header, which must stay small."""


class Times(NamedTuple):
    """Moments of a request, in seconds since the Unix epoch; None: it did not come to that."""

    arrived: float
    ingested: float | None
    published: float | None
    first: float | None


class Published(NamedTuple):
    """What is remembered of a request whose jobs are published; see :class:`SentRequest`."""

    items: list[Item]
    origins: list[ItemOrigin]
    ingested: float
    published: float
    placed: str


class Trail:
    """What became of one request."""

    __slots__ = (
        "_arrived",
        "_began",
        "_ended",
        "_error",
        "_first",
        "_model",
        "_receipt",
        "_reply",
        "_route",
        "_sent",
        "_stream",
        "request_id",
        "state",
        "status",
        "tenant",
    )

    def __init__(
        self,
        *,
        request_id: str,
        route: str,
        tenant: str,
        model: object,
        stream: bool,
        started: float,
    ) -> None:
        """
        Args:
            model: What the body says.
            started: When the request arrived, by the monotonic clock.
        """
        self.request_id = request_id
        self.tenant = tenant
        self._route = route
        self._model = model[:200] if isinstance(model, str) else ""
        self._stream = stream
        self._began = started
        self._arrived = time.time() - (time.monotonic() - started)
        self._sent: Published | None = None
        self._reply: Reply | None = None
        """Until its end only: it holds each token of the answer."""
        self._first: float | None = None
        self._ended: float | None = None
        self.status = 0
        self.state = "open"
        self._error: dict[str, Any] | None = None
        self._receipt: Receipt | None = None

    def sent(self, sent: SentRequest) -> None:
        """Its jobs are published."""
        self._reply = sent.reply
        self._sent = Published(sent.items, sent.origins, sent.ingested, sent.published, sent.placed)

    def first(self) -> None:
        """The first byte of its answer goes to the client."""
        if self._first is None:
            self._first = time.monotonic()

    def failed(self, error: EpdError) -> None:
        # Not the error itself: behind it are all frames it came through, with the request's body.
        self._error = _error(error)

    def end(self, status: int, state: str) -> None:
        self.status, self.state, self._ended = status, state, time.monotonic()
        if self._reply is not None:
            self._told(self._reply.receipt)
            self._reply = None

    @property
    def code(self) -> str:
        """Of the error with which it ended; the status where nothing more is known."""
        return str(self.status if self._error is None else self._error["code"])

    def times(self) -> Times:
        sent = self._sent
        ingested, published = (sent.ingested, sent.published) if sent else (None, None)
        offset = self._arrived - self._began
        return Times(
            self._arrived,
            *(None if at is None else at + offset for at in (ingested, published, self._first)),
        )

    def shown(self) -> dict[str, Any]:
        """As JSON-able fields; ``docs/operations.md`` says what they mean."""
        sent, receipt = self._sent, self._receipt
        prefill = receipt.prefill if receipt is not None else None
        prefill_pulled, pulled = self._pulled()
        return {
            "request_id": self.request_id,
            "route": self._route,
            "model": self._model,
            "arrived": round(self._arrived, 3),
            "state": self.state,
            "status": self.status or None,
            "stream": self._stream,
            "ingested_s": self._since(sent.ingested if sent else None),
            "published_s": self._since(sent.published if sent else None),
            "placement": sent.placed if sent else "",
            "first_s": self._since(self._first),
            "ended_s": self._since(self._ended),
            "error": self._error,
            "prefill": _worker(prefill, prefill_pulled) if prefill is not None else None,
            "pd": _worker(receipt, pulled) if receipt is not None else None,
            "items": self._items(prefill_pulled, pulled),
        }

    def short(self) -> str:
        """As one line for a header, with the first few items."""
        shown = self.shown()
        shown["items"] = shown["items"][:SHORT_ITEMS]
        return json.dumps(shown, separators=(",", ":"))

    def _told(self, receipt: Receipt | None) -> None:
        """The PD worker's word on it."""
        if self._sent is None or receipt is None:
            return
        if credible(receipt, items=len(self._sent.items)):
            self._receipt = receipt
        else:
            logger.warning(
                "the receipt of worker %.64r cannot be, and is not shown",
                receipt.worker,
                extra={"request_id": self.request_id},
            )

    def _items(self, prefill_pulled: float, pulled: float) -> list[dict[str, Any]]:
        """A decode worker has items of its own only where it had to prefill, and then it is about these."""
        sent = self._sent
        if sent is None:
            return []
        told: dict[str, tuple[ItemReceipt, float]] = {}
        if (receipt := self._receipt) is not None:
            if receipt.prefill is not None:
                told |= {item.key: (item, prefill_pulled) for item in receipt.prefill.items}
            told |= {item.key: (item, pulled) for item in receipt.items}
        return [
            _item(item, origin, *told.get(item.key, (ItemReceipt(key=item.key), pulled)))
            for item, origin in zip(sent.items, sent.origins, strict=True)
        ]

    def _pulled(self) -> tuple[float, float]:
        """When the prefill worker and who answered took their jobs, in seconds since the arrival."""
        if self._sent is None or self._receipt is None:
            return 0.0, 0.0
        published = self._sent.published - self._began
        prefill = self._receipt.prefill
        if prefill is None:
            return 0.0, published + self._receipt.queued_s
        pulled = published + prefill.queued_s
        return pulled, pulled + prefill.ended_s + self._receipt.queued_s

    def _since(self, moment: float | None) -> float | None:
        return None if moment is None else round(moment - self._began, 6)


class Trails:
    """The latest trails, at most ``KEPT``."""

    def __init__(self) -> None:
        self._trails: dict[str, Trail] = {}

    def begin(self, trail: Trail) -> Trail:
        self._trails[trail.request_id] = trail
        if len(self._trails) > KEPT:
            del self._trails[next(iter(self._trails))]
        return trail

    def find(self, request_id: str, *, tenant: str | None = None) -> Trail | None:
        """One request's; None if it is not remembered, or is another tenant's.

        Args:
            tenant: Whose it must be; None: anybody's.
        """
        trail = self._trails.get(request_id)
        return trail if trail is not None and tenant in (None, trail.tenant) else None

    def latest(self, count: int, *, tenant: str) -> list[dict[str, Any]]:
        """A tenant's, the newest first."""
        mine = (trail for trail in reversed(self._trails.values()) if trail.tenant == tenant)
        return [trail.shown() for trail, _ in zip(mine, range(count), strict=False)]


def _worker(receipt: Receipt, pulled: float) -> dict[str, Any]:
    return {
        "worker": receipt.worker,
        "node": receipt.node,
        "attempt": receipt.attempt,
        "pulled_s": _moved(0.0, pulled),
        "prepared_s": _moved(receipt.prepared_s, pulled),
        "entered_s": _moved(receipt.entered_s, pulled),
        "first_s": _moved(receipt.first_s, pulled),
        "ended_s": _moved(receipt.ended_s, pulled),
        "prompt_tokens": receipt.prompt_tokens,
        "loaded_tokens": receipt.loaded_tokens,
        "resumed_tokens": receipt.resumed_tokens,
        "restarts": receipt.restarts,
    }


def _item(item: Item, origin: str, told: ItemReceipt, pulled: float) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "key": item.key,
        "modality": item.modality,
        "width": item.width,
        "height": item.height,
        "origin": origin,
    }
    encoded = origin != "reused" and bool(told.encode_s)
    return shown | {
        "encoder": told.encoder,
        "attempt": told.attempt,
        "rescue": told.rescue,
        **{
            name: round(getattr(told, name), 6) if encoded else None
            for name in ("queued_s", "media_s", "encode_s", "publish_s")
        },
        "sized_s": _moved(told.sized_s, pulled),
        "ready_s": _moved(told.ready_s, pulled),
        "pinned_s": _moved(told.pinned_s, pulled),
        "store": told.store,
        "rows": told.rows,
        "bytes": told.bytes,
    }


def _moved(seconds: float | None, pulled: float) -> float | None:
    return None if seconds is None else round(seconds + pulled, 6)


def _error(error: EpdError) -> dict[str, Any]:
    return {
        "status": error.status,
        "code": str(error.code)[:LONGEST],
        "message": error.message[:LONGEST],
        "stage": (error.stage or "")[:LONGEST],
    }
