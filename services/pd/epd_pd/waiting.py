"""What is known of one item while a request waits for it, and what to say about it."""

from __future__ import annotations

import asyncio
import time

from epd_common.errors import DeadlineError, SendAgainError, UpstreamError, from_status
from epd_common.orders import OrderContext
from epd_common.protocol import EmbeddingEvent, Item
from epd_common.store import Claim, EmbeddingHeader
from epd_common.store.states import OTHERS_MAY_SUCCEED
from epd_pd.rescue import Found, Situation
from epd_pd.trail import ItemMarks


class Wait:
    """What is known of one item while a request waits for it."""

    def __init__(
        self,
        item: Item,
        context: OrderContext,
        events: asyncio.Queue[EmbeddingEvent],
        marks: ItemMarks,
    ) -> None:
        self.marks = marks
        self.item = item
        self.context = context
        self.events = events
        self.claim = Claim("pending", 0)
        self.orders = 1
        self.tried_here = False
        self.away_since: float | None = None
        """Since when the store of states does not answer."""
        self._taken_over = False
        self._began = self._ordered = time.monotonic()

    def look(self, claim: Claim) -> None:
        """The state as it was found now."""
        if claim.epoch > self.claim.epoch:
            self._ordered = time.monotonic()
            self._taken_over = False
        self._taken_over |= claim.rescue
        self.claim = claim

    @property
    def total_s(self) -> float:
        """Seconds since the request began to wait."""
        return time.monotonic() - self._began

    def situation(self, encoders: bool) -> Situation:
        now = time.monotonic()
        return Situation(
            found=self._found(),
            orders=self.orders,
            waited_s=now - self._ordered,
            total_s=self.total_s,
            encoders=encoders,
            taken_over=self._taken_over,
            tried_here=self.tried_here,
        )

    def _found(self) -> Found:
        if self.claim.state == "ready":
            return "lost"
        if self.claim.state == "failed":
            return "refused" if is_final(self.claim.event) else "failed"
        return "pending"

    def announced(self, header: EmbeddingHeader) -> bool:
        """Whether an embedding has the shape and the metadata that its encoder announced."""
        event = self.claim.event
        if event is None or not event.rows:
            return True
        found = (header.rows, header.width, header.dtype, header.metadata)
        return found == (event.rows, event.width, event.dtype, event.metadata)

    @property
    def trouble(self) -> str:
        """What is wrong with an item that was to be here."""
        if self.claim.state == "ready":
            return "is in no store, or not as it should be"
        return f"failed: {self.claim.event.reason if self.claim.event else 'unknown'}"

    def reason(self, now: Situation) -> str:
        """Why the item is not here, in words for logs and errors."""
        if now.found != "pending":
            return f"its embedding {self.trouble}"
        if now.taken_over:
            return "a PD worker has taken it over and has not finished"
        if not now.encoders:
            return "no encoder is ready"
        if self.claim.event is not None:
            return f"encoder {self.claim.event.encoder} began it and has not finished"
        return "no encoder has begun it"

    def fields(self) -> dict[str, str]:
        return {"key": self.item.key, "request_id": self.context.request_id}

    def late(self) -> DeadlineError:
        key = self.item.key
        return DeadlineError(
            f"the deadline passed while item {key} was being encoded", stage="encode", key=key
        )

    def gave_up(self, now: Situation) -> Exception:
        """The error of the request whose item this is."""
        key, failure = self.item.key, self.claim.event
        late = failure is not None and failure.status == DeadlineError.status
        if now.found == "pending" or late:
            return DeadlineError(
                f"item {key} was not encoded within {now.total_s:.1f} s: {self.reason(now)}",
                stage="encode",
                key=key,
            )
        if now.found == "refused" and failure is not None:
            return from_status(
                failure.status, failure.reason, code=failure.code, stage="encode", key=key
            )
        if failure is not None and failure.status == SendAgainError.status:
            return SendAgainError(
                f"item {key} could not be encoded in {self.orders} attempts: {failure.reason}",
                code=failure.code,
                stage="encode",
                key=key,
                retry_after_s=1.0,
            )
        if failure is not None and failure.code == SendAgainError.default_code:
            return SendAgainError(
                f"the media of item {key} were lost before they were encoded, as when Valkey restarts; "
                "send the request again",
                stage="encode",
                key=key,
                retry_after_s=1.0,
            )
        here = " nor by this worker" if self.tried_here else ""
        return UpstreamError(
            f"item {key} could not be encoded in {self.orders} attempts{here}: {self.reason(now)}",
            code="encode_failed",
            stage="encode",
            key=key,
        )


def is_final(failure: EmbeddingEvent | None) -> bool:
    """Whether these bytes can never be encoded. Another's job may have lacked them: ours has them."""
    return failure is not None and failure.status < 500 and failure.code not in OTHERS_MAY_SUCCEED
