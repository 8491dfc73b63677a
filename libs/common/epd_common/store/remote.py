"""What a store does besides whose embeddings other nodes read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from epd_common.protocol import Locator
from epd_common.store.arena import Arena
from epd_common.store.base import EmbeddingStore
from epd_common.store.embedding import EmbeddingHeader


class RemoteStore(EmbeddingStore, Protocol):
    """A store whose embeddings can be read from other nodes."""

    def locator(self, key: str) -> Locator | None:
        """Where an embedding that was put can be read; None: it had to go meanwhile."""

    async def bring(
        self,
        key: str,
        locators: Sequence[Locator],
        arena: Arena,
        fits: Callable[[EmbeddingHeader], bool],
    ) -> EmbeddingHeader | None:
        """Copy an embedding into a node's arena, verified; None as with :meth:`get`.

        Args:
            locators: Where it was said to be; of other stores, too.
            fits: Whether it is of use there; one that is not is deleted here.

        Raises:
            StoreFullError: the arena has no room, and none can be made.
        """
