"""Media bytes and uploaded files in Valkey or Redis.

Media are kept by digest and scope, so equal bytes are kept once and no tenant can name another's.
"""

from __future__ import annotations

import secrets
import time

import msgspec
from redis.asyncio import Redis

from epd_common.store.redis_client import as_bytes, redis_errors

_MEDIA = "epd:v1:media:"
_FILE = "epd:v1:file:"
_BODY = "epd:v1:body:"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded file: its bytes are the media with this ``ref``; ``bytes`` and times as in OpenAI's API."""

    file_id: str
    filename: str
    purpose: str
    created_at: int
    bytes: int
    digest: str
    ref: str
    content_type: str
    width: int
    height: int


class MediaStore:
    """Media, files and large bodies, each with a time to live.

    Args:
        ttl_s: Seconds that bytes stay after their last use.
    """

    def __init__(self, redis: Redis, *, ttl_s: int) -> None:
        self._redis = redis
        self._ttl_s = ttl_s

    async def put(self, data: bytes, *, digest: str, content_type: str, scope: str = "") -> str:
        """Store media; returns the reference that gets them back. Doing so twice is harmless."""
        ref = f"{scope}:{digest}"
        with redis_errors():
            if not await self._redis.expire(_MEDIA + ref, self._ttl_s):
                await self._redis.set(_MEDIA + ref, data, ex=self._ttl_s)
        return ref

    async def get(self, ref: str) -> bytes | None:
        """The bytes of a reference, or None if their time is over."""
        with redis_errors():
            data = await self._redis.getex(_MEDIA + ref, ex=self._ttl_s)
        return None if data is None else as_bytes(data)

    async def put_body(self, data: bytes) -> str:
        """Store a request body that is too large for a message."""
        ref = secrets.token_hex(16)
        with redis_errors():
            await self._redis.set(_BODY + ref, data, ex=self._ttl_s)
        return ref

    async def get_body(self, ref: str) -> bytes | None:
        with redis_errors():
            data = await self._redis.get(_BODY + ref)
        return None if data is None else as_bytes(data)

    async def add_file(
        self,
        data: bytes,
        *,
        filename: str,
        purpose: str,
        digest: str,
        content_type: str,
        width: int,
        height: int,
        scope: str = "",
    ) -> StoredFile:
        """Keep an upload under a new file id."""
        ref = await self.put(data, digest=digest, content_type=content_type, scope=scope)
        file = StoredFile(
            file_id=f"file-{secrets.token_hex(12)}",
            filename=filename,
            purpose=purpose,
            created_at=int(time.time()),
            bytes=len(data),
            digest=digest,
            ref=ref,
            content_type=content_type,
            width=width,
            height=height,
        )
        with redis_errors():
            name = f"{_FILE}{scope}:{file.file_id}"
            await self._redis.set(name, msgspec.msgpack.encode(file), ex=self._ttl_s)
        return file

    async def lookup(self, file_id: str, scope: str) -> StoredFile | None:
        """A file by its id; None if it is unknown in this scope or its time is over."""
        with redis_errors():
            raw = await self._redis.getex(f"{_FILE}{scope}:{file_id}", ex=self._ttl_s)
            if raw is None:
                return None
            file = msgspec.msgpack.decode(as_bytes(raw), type=StoredFile)
            if not await self._redis.expire(_MEDIA + file.ref, self._ttl_s):
                return None
        return file

    async def delete_file(self, file_id: str, scope: str) -> bool:
        """Forget a file id; its media go when their time is over. False if it was unknown."""
        with redis_errors():
            return bool(await self._redis.delete(f"{_FILE}{scope}:{file_id}"))
