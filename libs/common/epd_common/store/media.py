"""Media bytes and uploaded files in Valkey or Redis.

Media are kept by digest, so equal bytes are kept once: who can name them has had them. Files are known in
their scope (tenant) alone.
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
    """A picture that was checked and lies in the media store under ``ref``."""

    digest: str
    ref: str
    content_type: str
    width: int
    height: int
    bytes: int


class UploadedFile(msgspec.Struct, frozen=True, kw_only=True):
    """An upload as OpenAI's files API shows it, and where its bytes are."""

    file_id: str
    filename: str
    purpose: str
    created_at: int
    file: StoredFile


class MediaStore:
    """Media, files and large bodies, each with a time to live.

    Args:
        ttl_s: Seconds that bytes stay after their last use.
    """

    def __init__(self, redis: Redis, *, ttl_s: int) -> None:
        self._redis = redis
        self._ttl_s = ttl_s

    async def put(self, data: bytes, *, digest: str, content_type: str) -> str:
        """Store media; returns the reference that gets them back. Doing so twice is harmless."""
        with redis_errors():
            if not await self._redis.expire(_MEDIA + digest, self._ttl_s):
                await self._redis.set(_MEDIA + digest, data, ex=self._ttl_s)
        return digest

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
        self, file: StoredFile, *, filename: str, purpose: str, scope: str
    ) -> UploadedFile:
        """Give a picture that lies here a file id, known in this scope alone."""
        uploaded = UploadedFile(
            file_id=f"file-{secrets.token_hex(12)}",
            filename=filename,
            purpose=purpose,
            created_at=int(time.time()),
            file=file,
        )
        with redis_errors():
            name = _file_name(uploaded.file_id, scope)
            await self._redis.set(name, msgspec.msgpack.encode(uploaded), ex=self._ttl_s)
        return uploaded

    async def uploaded(self, file_id: str, scope: str) -> UploadedFile | None:
        """An upload by its id; None if it is unknown in this scope or its time is over."""
        with redis_errors():
            raw = await self._redis.getex(_file_name(file_id, scope), ex=self._ttl_s)
            if raw is None:
                return None
            found = msgspec.msgpack.decode(as_bytes(raw), type=UploadedFile)
            if not await self._redis.expire(_MEDIA + found.file.ref, self._ttl_s):
                return None
        return found

    async def lookup(self, file_id: str, scope: str) -> StoredFile | None:
        """The picture of an upload; see :meth:`uploaded`."""
        found = await self.uploaded(file_id, scope)
        return found.file if found is not None else None

    async def delete_file(self, file_id: str, scope: str) -> bool:
        """Forget a file id; its bytes go when their time is over. False if it was unknown."""
        with redis_errors():
            return bool(await self._redis.delete(_file_name(file_id, scope)))


def _file_name(file_id: str, scope: str) -> str:
    # With the length in front no id makes the name of another scope's file.
    return f"{_FILE}{len(scope)}:{scope}:{file_id}"
