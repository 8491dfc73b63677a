"""What every embedding store does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from epd_common.errors import EpdError
from epd_common.store.embedding import Embedding, EmbeddingHeader

if TYPE_CHECKING:
    from epd_common.store.arena import Arena


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


class RemoteStore(EmbeddingStore, Protocol):
    """A store whose embeddings can be read from other nodes."""

    async def bring(
        self, key: str, arena: Arena, fits: Callable[[EmbeddingHeader], bool]
    ) -> EmbeddingHeader | None:
        """Copy an embedding into a node's arena, verified; None as with :meth:`get`.

        Args:
            fits: Whether it is of use there; one that is not is deleted here.

        Raises:
            StoreFullError: the arena has no room, and none can be made.
        """
