"""Embeddings in Valkey or Redis, for PD workers on other nodes.

Payloads go in chunks, as single values over 8 MB are slow; the header is written last, so an embedding
is there once its header is. Every value has the same time to live, renewed at each use; where there is no
room for more, those that were not used for the longest time go (``embedding_room.py``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from redis.asyncio import Redis

from epd_common.store.embedding import (
    Embedding,
    IntegrityError,
    pack_header,
    unpack_header,
)
from epd_common.store.embedding_room import EmbeddingRoom
from epd_common.store.redis_client import as_bytes, redis_errors

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
_PREFIX = "epd:v1:emb:"


class RedisEmbeddingStore:
    """Embeddings by key, with a time to live.

    Args:
        ttl_s: Seconds that an embedding stays after its last use.
        bound_bytes: Of all embeddings; see ``EmbeddingRoom``, as for ``counters``.
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
        self._ttl_s = ttl_s
        self._room = EmbeddingRoom(
            redis,
            bound_bytes=bound_bytes,
            ttl_s=ttl_s,
            prefix=_PREFIX,
            chunk_bytes=CHUNK_BYTES,
            counters=Counter() if counters is None else counters,
        )

    async def put(self, embedding: Embedding) -> None:
        key = embedding.header.key
        payload = embedding.payload
        await self._room.make(key, payload.nbytes)
        with redis_errors():
            for start in range(0, payload.nbytes, CHUNK_BYTES):
                name = _chunk(key, start // CHUNK_BYTES)
                await self._redis.set(name, payload[start : start + CHUNK_BYTES], ex=self._ttl_s)
            await self._redis.set(_head(key), pack_header(embedding.header), ex=self._ttl_s)
        if not await self._room.touch(key):  # others took its room while it was written
            await self._room.make(key, payload.nbytes)

    async def get(self, key: str) -> Embedding | None:
        with redis_errors():
            head = await self._redis.getex(_head(key), ex=self._ttl_s)
            if head is None:
                return None
            try:
                header = unpack_header(as_bytes(head))
                payload = await self._payload(key, header.payload_bytes)
                embedding = Embedding(header, memoryview(payload))
                await asyncio.to_thread(embedding.verify)
            except IntegrityError as error:
                logger.warning("dropping a damaged embedding: %s", error, extra={"key": key})
                await self.delete(key)
                return None
        await self._room.touch(key)
        return embedding

    async def _payload(self, key: str, size: int) -> bytearray:
        """All chunks in one buffer; a missing chunk leaves zeros, which the checksum finds."""
        buffer = bytearray(size)
        for start in range(0, size, CHUNK_BYTES):
            chunk = await self._redis.getex(_chunk(key, start // CHUNK_BYTES), ex=self._ttl_s)
            part = b"" if chunk is None else as_bytes(chunk)[: size - start]
            buffer[start : start + len(part)] = part
        return buffer

    async def contains(self, key: str) -> bool:
        with redis_errors():
            head = await self._redis.get(_head(key))
            if head is None:
                return False
            try:
                size = unpack_header(as_bytes(head)).payload_bytes
            except IntegrityError:
                return False
            names = [_chunk(key, start // CHUNK_BYTES) for start in range(0, size, CHUNK_BYTES)]
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
