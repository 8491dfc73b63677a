"""What every embedding store does."""

from __future__ import annotations

from typing import Protocol

from epd_common.errors import EpdError
from epd_common.store.embedding import Embedding


class StoreFullError(EpdError):
    """The store cannot take an embedding now: nothing in it may be evicted."""

    status = 503
    default_code = "store_full"
    default_retry_after_s = 1.0


class EmbeddingStore(Protocol):
    """Keeps embeddings by key. A missing one is normal and means "encode again"."""

    name: str

    async def put(self, embedding: Embedding) -> None:
        """Make an embedding readable, whole or not at all; one that is there already stays.

        Raises:
            StoreFullError: no room, and none can be made.
        """

    async def get(self, key: str) -> Embedding | None:
        """The embedding, verified; None if it is not (or no longer) there, or damaged."""

    async def contains(self, key: str) -> bool:
        """Whether :meth:`get` would very likely find it; renews its place in the order of eviction."""

    async def delete(self, key: str) -> None:
        """Forget it; unknown keys are fine."""

    async def used_bytes(self) -> int:
        """Bytes in use by embeddings."""
