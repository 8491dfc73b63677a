"""What happened when to one attempt at a request, and the receipt that is made of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from epd_common.engines import Loaded
from epd_common.protocol import EmbeddingEvent, Item, ItemReceipt, Receipt
from epd_common.protocol.receipts import Rescue
from epd_common.store import EmbeddingHeader


@dataclass(slots=True)
class ItemMarks:
    """What happened to one item. Times are of the monotonic clock; None: not yet.

    Attributes:
        was_there: It was in a store already when it was looked up first.
        event: That announced it.
        store: From which it came.
    """

    sized: float | None = None
    ready: float | None = None
    pinned: float | None = None
    was_there: bool = False
    event: EmbeddingEvent | None = None
    header: EmbeddingHeader | None = None
    store: str = ""
    rescue: Rescue = ""

    def note_sized(self) -> None:
        if self.sized is None:
            self.sized = time.monotonic()

    def note_ready(self, *, at_once: bool) -> None:
        """A store has it, as far as is known; ``at_once``: nobody had to be waited for."""
        if self.ready is None:
            self.ready = time.monotonic()
            self.was_there = at_once

    def note_pinned(
        self, event: EmbeddingEvent | None, header: EmbeddingHeader, store: str
    ) -> None:
        self.pinned = time.monotonic()
        self.event, self.header, self.store = event, header, store


class Trail:
    """What happened to one attempt at a request.

    Args:
        began: When the job was taken from its queue, by the monotonic clock.
        queued_s: How long it had lain there.
        prefill: The receipt of the prefill worker whose decode job it is.
    """

    def __init__(
        self,
        *,
        worker: str,
        node: str,
        attempt: int,
        began: float,
        queued_s: float,
        prefill: Receipt | None = None,
    ) -> None:
        self._worker = worker
        self._node = node
        self._attempt = attempt
        self._began = began
        self._queued_s = queued_s
        self._prefill = prefill
        self._prepared: float | None = None
        self._entered: float | None = None
        self._first: float | None = None
        self._items: Sequence[Item] = ()
        self._marks: Sequence[ItemMarks] = ()
        self.prompt_tokens = 0
        self.loaded: Loaded | None = None
        self.resumed_tokens = 0
        self.restarts = 0

    def prepared(self, items: Sequence[Item], marks: Sequence[ItemMarks]) -> None:
        """The request is understood; these are its items, and where their marks will stand."""
        self._prepared = time.monotonic()
        self._items, self._marks = items, marks

    def entered(self) -> None:
        """The engine gets it; the last time counts, as what was before was for nothing."""
        self._entered = time.monotonic()

    def answered(self) -> None:
        """A piece of the answer is there."""
        if self._first is None:
            self._first = time.monotonic()

    @property
    def told_after_s(self) -> float | None:
        """Seconds from the job's publishing to the first piece of the answer."""
        return None if self._first is None else self._queued_s + self._first - self._began

    def receipt(self) -> Receipt:
        """All of it, ending now."""
        return Receipt(
            worker=self._worker,
            node=self._node,
            attempt=self._attempt,
            queued_s=self._queued_s,
            prepared_s=self._since(self._prepared),
            entered_s=self._since(self._entered),
            first_s=self._since(self._first),
            ended_s=time.monotonic() - self._began,
            prompt_tokens=self.prompt_tokens,
            loaded_tokens=self.loaded.loaded_tokens if self.loaded else 0,
            resumed_tokens=self.resumed_tokens,
            restarts=self.restarts,
            items=[
                self._item(item, marks)
                for item, marks in zip(self._items, self._marks, strict=True)
            ],
            prefill=self._prefill,
        )

    def _item(self, item: Item, marks: ItemMarks) -> ItemReceipt:
        event, header = marks.event, marks.header
        made = None if marks.was_there else event
        return ItemReceipt(
            key=item.key,
            modality=item.modality,
            width=item.width,
            height=item.height,
            encoder=event.encoder if event else "",
            attempt=event.attempt if event else 0,
            rescue=marks.rescue,
            queued_s=made.queue_s if made else 0.0,
            media_s=made.media_s if made else 0.0,
            encode_s=made.encode_s if made else 0.0,
            publish_s=made.publish_s if made else 0.0,
            sized_s=self._since(marks.sized),
            ready_s=self._since(marks.ready),
            pinned_s=self._since(marks.pinned),
            store=marks.store,
            rows=header.rows if header else 0,
            bytes=header.payload_bytes if header else 0,
        )

    def _since(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self._began
