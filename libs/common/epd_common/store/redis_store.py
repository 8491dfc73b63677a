"""Embeddings in Valkey or Redis, for PD workers on other nodes.

Payloads go in chunks, as single values over 8 MB are slow; the header is written last, so an embedding
is there once its header is. Every value has the same time to live, renewed at each use; where there is no
room for more, those that were not used for the longest time go (``embedding_room.py``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from redis.asyncio import Redis

from epd_common.protocol import Locator
from epd_common.store.arena import Arena
from epd_common.store.bulk_reader import BulkReader, Values
from epd_common.store.embedding import (
    Embedding,
    EmbeddingHeader,
    IntegrityError,
    RunningChecksum,
    pack_header,
    unpack_header,
)
from epd_common.store.embedding_room import EmbeddingRoom
from epd_common.store.redis_client import as_bytes, redis_errors

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
_PREFIX = "epd:v1:emb:"

T = TypeVar("T")


class RedisEmbeddingStore:
    """Embeddings by key, with a time to live.

    Args:
        ttl_s: Seconds that an embedding stays after its last use.
        bound_bytes: Of all embeddings; see ``EmbeddingRoom``.
        counters: ``redis_written``, ``redis_written_bytes``, and those of ``EmbeddingRoom``.
    """

    name = "redis"

    def __init__(
        self,
        redis: Redis,
        *,
        ttl_s: int,
        bound_bytes: int = 0,
        counters: Counter[str] | None = None,
    ) -> None:
        self._redis = redis
        self._reader = BulkReader(redis, most_bytes=CHUNK_BYTES)
        self._ttl_s = ttl_s
        self._counters = Counter() if counters is None else counters
        self._room = EmbeddingRoom(
            redis,
            bound_bytes=bound_bytes,
            ttl_s=ttl_s,
            prefix=_PREFIX,
            chunk_bytes=CHUNK_BYTES,
            counters=self._counters,
        )

    async def aclose(self) -> None:
        """End what is being read, with an error. The client is its opener's to close."""
        await self._reader.aclose()

    async def put(self, embedding: Embedding) -> None:
        key = embedding.header.key
        payload = embedding.payload
        await self._room.make(key, payload.nbytes)
        with redis_errors():
            for start in range(0, payload.nbytes, CHUNK_BYTES):
                name = _chunk(key, start // CHUNK_BYTES)
                await self._redis.set(name, payload[start : start + CHUNK_BYTES], ex=self._ttl_s)
            await self._redis.set(_head(key), pack_header(embedding.header), ex=self._ttl_s)
        self._counters["redis_written"] += 1
        self._counters["redis_written_bytes"] += payload.nbytes
        if not await self._room.touch(key):  # others took its room while it was written
            await self._room.make(key, payload.nbytes)

    async def get(self, key: str) -> Embedding | None:
        return await self._fetch(key, _in_memory)

    def locator(self, key: str) -> Locator | None:
        return Locator(store=self.name)

    async def bring(
        self,
        key: str,
        locators: Sequence[Locator],
        arena: Arena,
        fits: Callable[[EmbeddingHeader], bool],
    ) -> EmbeddingHeader | None:
        """As ``RemoteStore`` says; it needs no locators."""

        def take(header: EmbeddingHeader, parts: Iterator[memoryview]) -> EmbeddingHeader:
            arena.receive(header, parts)
            return header

        return await self._fetch(key, take, fits)

    async def _fetch(
        self,
        key: str,
        take: Callable[[EmbeddingHeader, Iterator[memoryview]], T],
        fits: Callable[[EmbeddingHeader], bool] = lambda header: True,
    ) -> T | None:
        """What ``take`` makes of header and payload, in a thread; the payload's end says that it is right."""
        with redis_errors():
            head = await self._redis.getex(_head(key), ex=self._ttl_s)
            if head is None:
                return None
            try:
                header = unpack_header(as_bytes(head))
                if not fits(header):  # it would be brought each time
                    await self.delete(key)
                    return None
                taken = await self._reader.read(
                    _chunks(key, header.payload_bytes),
                    ttl_s=self._ttl_s,
                    take=lambda values: take(header, _verified(header, values)),
                )
            except IntegrityError as error:
                logger.warning("dropping a damaged embedding: %s", error, extra={"key": key})
                await self.delete(key)
                return None
        await self._room.touch(key)
        return taken

    async def contains(self, key: str) -> bool:
        with redis_errors():
            head = await self._redis.get(_head(key))
            if head is None:
                return False
            try:
                size = unpack_header(as_bytes(head)).payload_bytes
            except IntegrityError:
                return False
            names = _chunks(key, size)
            pipe = self._redis.pipeline(transaction=False)
            for name in (*names, _head(key)):
                pipe.expire(name, self._ttl_s)
            if not all(await pipe.execute()):
                return False
        await self._room.touch(key)
        return True

    async def delete(self, key: str) -> None:
        """Forget it. Without its header an embedding is not there; its chunks go with their time."""
        with redis_errors():
            await self._redis.delete(_head(key))
        await self._room.forget(key)

    async def used_bytes(self) -> int:
        total = 0
        with redis_errors():
            async for name in self._redis.scan_iter(match=f"{_PREFIX}*", count=500):
                total += await self._redis.strlen(name)
        return total


def _head(key: str) -> str:
    return f"{_PREFIX}{key}"


def _chunk(key: str, number: int) -> str:
    return f"{_PREFIX}{key}:{number}"


def _chunks(key: str, size: int) -> list[str]:
    """Names of all chunks of a payload."""
    return [_chunk(key, start // CHUNK_BYTES) for start in range(0, size, CHUNK_BYTES)]


def _verified(header: EmbeddingHeader, values: Values) -> Iterator[memoryview]:
    """The chunks of a payload; an error where one is missing, and instead of an end where one is damaged."""
    checksum = RunningChecksum()
    left = header.payload_bytes
    for value in values:
        if value is None or value.nbytes != min(left, CHUNK_BYTES):
            raise IntegrityError(
                f"a chunk of embedding {header.key} is missing or has another size"
            )
        left -= value.nbytes
        checksum.update(value)
        yield value
    if checksum.hex() != header.checksum:
        raise IntegrityError(f"embedding {header.key} does not match its checksum", key=header.key)


def _in_memory(header: EmbeddingHeader, parts: Iterator[memoryview]) -> Embedding:
    payload = memoryview(bytearray(header.payload_bytes))
    at = 0
    for part in parts:
        payload[at : at + part.nbytes] = part
        at += part.nbytes
    return Embedding(header, payload)
