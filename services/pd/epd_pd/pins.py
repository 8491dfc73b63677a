"""Bringing embeddings to this node and pinning them, once for all requests that use them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

from epd_common.engines import EngineInfo
from epd_common.protocol import Locator
from epd_common.store import Arena, EmbeddingHeader, IntegrityError, RemoteStore
from epd_common.store.arena import map_embedding

logger = logging.getLogger(__name__)


class Pins:
    """Counts who uses which pinned embedding; the last to let go unpins it.

    A request that is inside the engine before all of its items are here goes by what is pinned, whoever
    pinned it. So it says at its beginning what it wants: from then on nothing of that is unpinned under it.

    Args:
        arena: This node's arena.
        remote: Other stores to bring embeddings from, nearest first.
        info: Of the engine here; an embedding that it cannot take is no embedding.
    """

    def __init__(
        self,
        arena: Arena,
        remote: Sequence[RemoteStore],
        *,
        info: EngineInfo,
        counters: Counter[str],
    ) -> None:
        self._arena = arena
        self._remote = remote
        self._info = info
        self._counters = counters
        self._users: Counter[str] = Counter()
        self._wanted: Counter[str] = Counter()
        self._headers: dict[str, EmbeddingHeader] = {}
        self._sources: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    @contextlib.contextmanager
    def wanted(self, keys: Sequence[str]) -> Iterator[None]:
        """What is pinned of these, or comes to be, stays so for the context."""
        self._wanted.update(keys)
        try:
            yield
        finally:
            for key in keys:
                self._wanted[key] -= 1
                self._settle(key)

    async def take(
        self, key: str, *, locators: Sequence[Locator] = (), here_alone: bool = False
    ) -> EmbeddingHeader | None:
        """Pin an embedding and return its header; None if no store has a usable one.

        The caller gives it back with :meth:`release`.

        Args:
            locators: Where it was said to be.
            here_alone: Look in this node's arena and nowhere else.
        """
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] += 1
        header = None
        try:
            async with lock:
                header = self._headers.get(key)
                if header is None:
                    remote = () if here_alone else self._remote
                    header = await self._bring(key, remote, locators)
        finally:
            if header is None:
                self.release(key)
            else:
                self._headers[key] = header
        return header

    def source(self, key: str) -> str:
        """The store from which a pinned embedding came."""
        return self._sources.get(key, "")

    def release(self, key: str) -> None:
        """One user less."""
        self._users[key] -= 1
        self._settle(key)

    def _settle(self, key: str) -> None:
        if self._users[key] > 0 or self._wanted[key] > 0:
            return
        del self._users[key], self._wanted[key]
        self._locks.pop(key, None)
        self._unpin(key)

    def _unpin(self, key: str) -> None:
        self._headers.pop(key, None)
        self._sources.pop(key, None)
        self._arena.unpin(key)  # even without a header: one who was cancelled may have pinned it

    def report(self) -> dict[str, int]:
        """``keys`` that are held or wanted, and by how many ``users``."""
        return {"keys": len({*self._users, *self._wanted}), "users": self._users.total()}

    async def forget(self, key: str) -> None:
        """Delete an embedding that turned out to be wrong from every store that is read here, and its pin
        where nobody uses it."""
        if not self._users[key]:
            self._unpin(key)
        await self._arena.delete(key)
        for store in self._remote:
            await store.delete(key)

    async def _bring(
        self, key: str, remote: Sequence[RemoteStore], locators: Sequence[Locator]
    ) -> EmbeddingHeader | None:
        if (header := await self._pin(key)) is not None:
            self._counters["arena_hits"] += 1
            self._sources[key] = self._arena.name
            self._counters["arena_read_bytes"] += header.payload_bytes
            return header
        for store in remote:
            brought = await store.bring(
                key, locators, self._arena, lambda header: self._fits(key, header)
            )
            if brought is None:
                continue
            self._counters[f"{store.name}_fetches"] += 1
            self._counters[f"{store.name}_fetched_bytes"] += brought.payload_bytes
            if (header := await self._pin(key)) is not None:
                self._sources[key] = store.name
                return header
        return None

    def _fits(self, key: str, header: EmbeddingHeader) -> bool:
        """Whether the engine can take what another store has."""
        try:
            self._check(key, header)
        except IntegrityError as error:
            self._note_unusable(key, error)
            return False
        return True

    def _note_unusable(self, key: str, error: IntegrityError) -> None:
        logger.warning("unusable embedding dropped: %s", error, extra={"key": key})
        self._counters["integrity_faults"] += 1

    def _check(self, key: str, header: EmbeddingHeader) -> None:
        info = self._info
        if header.key != key or header.fingerprint != info.fingerprint:
            raise IntegrityError(f"embedding {key} was made for another key or model")
        if (header.width, header.dtype) != (info.width, info.dtype):
            raise IntegrityError(
                f"embedding {key} has rows of {header.width} {header.dtype} values, the model takes "
                f"{info.width} {info.dtype}"
            )
        info.check_rows(header)

    async def _pin(self, key: str) -> EmbeddingHeader | None:
        """Hold first, then verify, then expose: nothing can be evicted in between, and the engine, in which a
        request may wait for it already, sees nothing that was not verified."""
        path = self._arena.hold(key)
        if path is None:
            return None
        try:
            embedding = map_embedding(path)
            if embedding is None:
                return None
            await asyncio.to_thread(embedding.verify)
            self._check(key, embedding.header)
        except IntegrityError as error:
            self._note_unusable(key, error)
            self._arena.unpin(key)
            await self._arena.delete(key)
            return None
        self._arena.expose(key)
        return embedding.header
