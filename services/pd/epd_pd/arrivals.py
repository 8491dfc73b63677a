"""What a request waits for: for each item first its metadata, then its embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from epd_common.changes import Changes
from epd_common.engines import Placeholder, is_grid
from epd_common.protocol import Item
from epd_common.store import EmbeddingHeader
from epd_pd.trail import ItemMarks


class ForecastError(Exception):
    """An item came with other metadata than were expected of its size; the prompt must be made anew."""


MAX_METADATA = 1_000_000
"""Largest number that metadata may hold: no item has so many rows."""

MAX_PATCHES = 16 * MAX_METADATA
"""Of a grid, of which several make a row."""


def is_metadata(metadata: object) -> bool:
    """Whether these could be an item's metadata: positive numbers and lists of such, by name."""
    if not isinstance(metadata, dict) or not metadata:
        return False
    numbers: list[object] = []
    for name, value in metadata.items():
        if name.endswith("_grid_thw") and not _is_grid(value):
            return False
        numbers += value if isinstance(value, list) else [value]
    return bool(numbers) and all(
        isinstance(number, int | float) and 0 <= number <= MAX_METADATA for number in numbers
    )


def _is_grid(value: object) -> bool:
    return is_grid(value) and 0 < math.prod(value) <= MAX_PATCHES


class Arrivals:
    """The items of one request, on their way.

    Args:
        media: By key, the bytes of those items whose room in the prompt only vLLM can tell, from the media.
    """

    def __init__(self, items: Sequence[Item], media: Mapping[str, bytes] | None = None) -> None:
        self.items = list(items)
        self.marks = [ItemMarks() for _ in items]
        self._media = media or {}
        self.changes = Changes()
        self.failure: BaseException | None = None
        self.reasons: dict[str, str] = {}
        """Why an item is not here yet, by key."""
        self._metadata: list[dict[str, Any] | None] = [
            {} if item.key in self._media else None for item in items
        ]
        self._headers: list[EmbeddingHeader | None] = [None] * len(items)
        self._used: list[dict[str, Any]] | None = None
        self._untold: list[ItemMarks] = []

    @property
    def sized(self) -> bool:
        """Whether the prompt can be made: the metadata of all items are known."""
        return all(known is not None for known in self._metadata)

    @property
    def complete(self) -> bool:
        """Whether all embeddings are pinned."""
        return self.first_missing is None

    @property
    def first_missing(self) -> str | None:
        """Key of the first item that is not pinned."""
        for item, header in zip(self.items, self._headers, strict=True):
            if header is None:
                return item.key
        return None

    @property
    def headers(self) -> list[EmbeddingHeader]:
        """Of those that are pinned."""
        return [header for header in self._headers if header is not None]

    @property
    def first_is_here(self) -> bool:
        """Whether the first item of the prompt is pinned."""
        return not self._headers or self._headers[0] is not None

    def placeholders(self) -> list[Placeholder]:
        """What the engine is told of the items now. Metadata that turn out otherwise are a failure."""
        known = [metadata for metadata in self._metadata if metadata is not None]
        self._used = list(known)
        return [
            Placeholder(item.key, item.modality, metadata, self._media.get(item.key))
            for item, metadata in zip(self.items, known, strict=True)
        ]

    async def settled(self) -> None:
        """Return when all embeddings are pinned, or one of them has failed or is other than forecast."""
        while True:
            seen = self.changes.count
            if self.complete or self.failure is not None:
                return
            await self.changes.since(seen)

    def forecast(self, index: int, metadata: dict[str, Any]) -> None:
        """Metadata from the table of sizes or an encoder's ``sized`` event."""
        if not is_metadata(metadata):
            return
        if self._headers[index] is None and self._metadata[index] != metadata:
            self._note(index, metadata)

    def untold(self) -> list[ItemMarks]:
        """Those of the items that arrived since this was asked last."""
        untold, self._untold = self._untold, []
        return untold

    def arrive(self, index: int, header: EmbeddingHeader) -> None:
        """The embedding is pinned; its own metadata are the real ones."""
        self._untold.append(self.marks[index])
        self._headers[index] = header
        self._note(index, header.metadata)

    def fail(self, failure: BaseException) -> None:
        """The first failure of an item is that of the request."""
        if self.failure is None:
            self.failure = failure
        self.changes.note()

    def begin_again(self) -> None:
        """The prompt is made anew, after a forecast was wrong."""
        self._used = None
        if isinstance(self.failure, ForecastError):
            self.failure = None

    def _note(self, index: int, metadata: dict[str, Any]) -> None:
        self._metadata[index] = metadata
        self.marks[index].note_sized()
        if self._used is not None and self._used[index] != metadata:
            self.fail(ForecastError(self.items[index].key))
        self.changes.note()
