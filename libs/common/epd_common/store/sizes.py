"""Sizes seen before: from a picture's size to the metadata and the rows that its embedding had.

How many rows a picture gives depends on its size and the processor's arguments alone, so a size that was
encoded once needs no encoder to tell. It is a forecast: the real metadata decide when they arrive.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis

from epd_common.protocol.jobs import Item
from epd_common.store.redis_client import as_bytes, redis_errors

_PREFIX = "epd:v1:sizes:2:"
MAX_SIZES = 20_000
"""Sizes kept of one model; beyond this new ones are not added."""

MAX_TABLES = 16
TTL_S = 7 * 24 * 3600


class Size(msgspec.Struct, frozen=True):
    """What items of one size have."""

    metadata: dict[str, Any]
    rows: int


class SizeTables:
    """The tables of all models."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._tables: OrderedDict[str, SizeTable] = OrderedDict()

    def of(self, fingerprint: str) -> SizeTable:
        """The table of a model; this process remembers the last few."""
        table = self._tables.setdefault(fingerprint, SizeTable(self._redis, fingerprint))
        self._tables.move_to_end(fingerprint)
        while len(self._tables) > MAX_TABLES:
            self._tables.popitem(last=False)
        return table


class SizeTable:
    """The table of one model, in Redis, with what this process has seen in memory."""

    def __init__(self, redis: Redis, fingerprint: str) -> None:
        self._redis = redis
        self._name = _PREFIX + fingerprint
        self._seen: OrderedDict[str, Size] = OrderedDict()

    async def look_up(self, items: Sequence[Item]) -> list[Size | None]:
        """What to expect of each item; None where its size is new."""
        names = [
            _name(item.modality, item.width, item.height, item.processor_args) for item in items
        ]
        unknown = [name for name in dict.fromkeys(names) if name not in self._seen]
        if unknown:
            with redis_errors():
                found = await self._redis.hmget(self._name, unknown)
            for name, raw in zip(unknown, found, strict=True):
                size = _read(as_bytes(raw)) if raw is not None else None
                if size is not None:
                    self._remember(name, size)
        return [self._seen.get(name) for name in names]

    async def add(
        self,
        modality: str,
        width: int,
        height: int,
        processor_args: dict[str, Any],
        metadata: dict[str, Any],
        rows: int,
    ) -> None:
        """Note what a size gave; known ones cost nothing."""
        name = _name(modality, width, height, processor_args)
        size = Size(metadata, rows)
        if not width or not height or self._seen.get(name) == size:
            return
        self._remember(name, size)
        with redis_errors():
            if await self._redis.hlen(self._name) < MAX_SIZES:
                # Together: the task of a request may end between any two words with Valkey.
                pipe = self._redis.pipeline(transaction=False)
                pipe.hset(self._name, name, msgspec.msgpack.encode(size))
                pipe.expire(self._name, TTL_S)
                await pipe.execute()

    def _remember(self, name: str, size: Size) -> None:
        self._seen[name] = size
        while len(self._seen) > MAX_SIZES:
            self._seen.popitem(last=False)


def _read(raw: bytes) -> Size | None:
    """A size as it is stored; what cannot be read is as good as a new one."""
    try:
        return msgspec.msgpack.decode(raw, type=Size)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _name(modality: str, width: int, height: int, processor_args: dict[str, Any]) -> str:
    args = json.dumps(processor_args, sort_keys=True, separators=(",", ":"))
    return f"{modality}:{width}x{height}:{args}"
