"""Media bytes and uploaded files in Valkey or Redis.

Media are kept by digest, so equal bytes are kept once: who can name them has had them. Files are known in
their scope (tenant) alone. Their time to live is renewed by who sends or names them, not by who reads them:
what a tenant keeps here is what its account says (``quotas.py``).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis

from epd_common.store.quotas import Kept, MediaQuota, MediaQuotas
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
        ttl_s: Seconds that media and files stay after a request last sent or named them.
        quotas: What tenants may have here; None where nobody is bounded.
    """

    def __init__(self, redis: Redis, *, ttl_s: int, quotas: MediaQuotas | None = None) -> None:
        self._redis = redis
        self._ttl_s = ttl_s
        self._quotas = quotas

    async def put(self, data: bytes, *, digest: str, content_type: str, owner: str = "") -> str:
        """Store media; returns the reference that gets them back. Doing so twice is harmless.

        Args:
            owner: The tenant in whose quota they are.

        Raises:
            BusyError, TooLargeError: the owner may not have so much here.
        """
        name = _MEDIA + digest
        if (quota := await self._quota(owner)) is not None:
            await quota.keep(name, data, ttl_s=self._ttl_s)
            return digest
        with redis_errors():
            if not await self._redis.expire(name, self._ttl_s):
                await self._redis.set(name, data, ex=self._ttl_s)
        return digest

    async def get(self, ref: str) -> bytes | None:
        """The bytes of a reference, or None if their time is over."""
        return await self._read(_MEDIA + ref)

    async def put_body(self, data: bytes, *, ttl_s: int, owner: str = "") -> str:
        """Store a request body that is too large for a message; see :meth:`put`."""
        ref = secrets.token_hex(16)
        await self._set(_BODY + ref, data, owner=owner, ttl_s=ttl_s)
        return ref

    async def get_body(self, ref: str) -> bytes | None:
        return await self._read(_BODY + ref)

    async def delete_body(self, ref: str, *, owner: str = "") -> None:
        """Forget a body whose request has ended."""
        await self._delete(_BODY + ref, owner)

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
        record = msgspec.msgpack.encode(uploaded)
        await self._set(_file_name(uploaded.file_id, scope), record, owner=scope, ttl_s=self._ttl_s)
        return uploaded

    async def uploaded(self, file_id: str, scope: str) -> UploadedFile | None:
        """An upload by its id; None if it is unknown in this scope or its time is over."""
        name = _file_name(file_id, scope)
        record = await self._read(name)
        if record is None:
            return None
        found = msgspec.msgpack.decode(record, type=UploadedFile)
        kept = [Kept(name, len(record)), Kept(_MEDIA + found.file.ref, found.file.bytes)]
        return found if all(await self._renew(kept, scope)) else None

    async def lookup(self, file_id: str, scope: str) -> StoredFile | None:
        """The picture of an upload; see :meth:`uploaded`."""
        found = await self.uploaded(file_id, scope)
        return found.file if found is not None else None

    async def delete_file(self, file_id: str, scope: str) -> bool:
        """Forget a file id; False if it was unknown.

        Its bytes go when their time is over, and are in its owner's quota until then: they may be another
        upload's as well, or a request's that is under way.
        """
        return await self._delete(_file_name(file_id, scope), scope)

    async def _quota(self, owner: str) -> MediaQuota | None:
        return None if self._quotas is None else await self._quotas.of(owner)

    async def _read(self, name: str) -> bytes | None:
        with redis_errors():
            data = await self._redis.get(name)
        return None if data is None else as_bytes(data)

    async def _set(self, name: str, data: bytes, *, owner: str, ttl_s: int) -> None:
        """Store what nobody else has stored under this name."""
        if (quota := await self._quota(owner)) is not None:
            return await quota.keep(name, data, ttl_s=ttl_s)
        with redis_errors():
            await self._redis.set(name, data, ex=ttl_s)

    async def _renew(self, kept: Sequence[Kept], owner: str) -> list[bool]:
        if (quota := await self._quota(owner)) is not None:
            return await quota.renew(kept, ttl_s=self._ttl_s)
        with redis_errors():
            pipe = self._redis.pipeline(transaction=False)
            for each in kept:
                pipe.expire(each.name, self._ttl_s)
            return list(await pipe.execute())

    async def _delete(self, name: str, owner: str) -> bool:
        if (quota := await self._quota(owner)) is not None:
            return await quota.drop(name)
        with redis_errors():
            return bool(await self._redis.delete(name))


def _file_name(file_id: str, scope: str) -> str:
    # With the length in front no id makes the name of another scope's file.
    return f"{_FILE}{len(scope)}:{scope}:{file_id}"
