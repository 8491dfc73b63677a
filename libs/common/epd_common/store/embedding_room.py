"""Room for embeddings in Valkey: how many bytes they may have together, and which go first.

An index in Valkey, shared by all workers: a sorted set (key -> last use in ms) and a hash (key -> bytes, and
their sum). Who writes an embedding asks for room first, and one script makes it: what was not used for a time
to live is forgotten, as it is gone, and then the least recently used are deleted. A reader who finds a part
of one missing has it encoded again, as always.
"""

from __future__ import annotations

from collections import Counter

from redis.asyncio import Redis

from epd_common.store.base import StoreFullError
from epd_common.store.maxmemory import MemoryShare
from epd_common.store.redis_client import redis_errors

PART = 2
"""Where no bound is set embeddings may have this part of Valkey's ``maxmemory``: one in so many."""

ORDER, SIZES = "epd:v1:embs:order", "epd:v1:embs:sizes"

_LAPSES = 200
"""Entries that one call forgets at most."""

# KEYS: order, sizes.
_COMMON = """
local order, sizes = KEYS[1], KEYS[2]
local function forget(key)
  redis.call('ZREM', order, key)
  local bytes = tonumber(redis.call('HGET', sizes, key))
  if bytes then
    redis.call('HDEL', sizes, key)
    redis.call('HINCRBY', sizes, 'sum', -bytes)
  end
  return bytes or 0
end
"""

# ARGV: key, bytes, bound, ttl in ms, prefix of embeddings' names, bytes of a chunk, lapses.
_MAKE = (
    _COMMON
    + """
local key, bytes, bound, ttl = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, name in ipairs(redis.call('ZRANGEBYSCORE', order, '-inf', now - ttl, 'LIMIT', 0, ARGV[7])) do
  forget(name)
end
forget(key)
local sum, evicted = tonumber(redis.call('HGET', sizes, 'sum') or 0), 0
while sum + bytes > bound do
  local first = redis.call('ZRANGE', order, 0, 0)[1]
  if not first then break end
  local freed = forget(first)
  redis.call('UNLINK', ARGV[5] .. first)
  for n = 0, math.ceil(freed / tonumber(ARGV[6])) - 1 do
    redis.call('UNLINK', ARGV[5] .. first .. ':' .. n)
  end
  sum, evicted = sum - freed, evicted + 1
end
redis.call('ZADD', order, now, key)
redis.call('HSET', sizes, key, bytes)
redis.call('HINCRBY', sizes, 'sum', bytes)
redis.call('PEXPIRE', order, 2 * ttl)
redis.call('PEXPIRE', sizes, 2 * ttl)
return evicted
"""
)

# ARGV: key, ttl in ms. Whether it is still there.
_TOUCH = """
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[1], time[1] * 1000 + math.floor(time[2] / 1000), ARGV[1])
for _, name in ipairs(KEYS) do redis.call('PEXPIRE', name, 2 * ARGV[2]) end
return 1
"""

_FORGET = _COMMON + "forget(ARGV[1])"


class EmbeddingRoom:
    """The index of one Valkey.

    Args:
        bound_bytes: Of all embeddings together; 0: half of Valkey's ``maxmemory``, and no bound where it has
            none.
        ttl_s: Seconds that an embedding stays after its last use.
        prefix: Of embeddings' names.
        chunk_bytes: Of their payloads, each but the last.
        counters: ``redis_evicted`` counts embeddings that made room for ones of this process.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        bound_bytes: int,
        ttl_s: int,
        prefix: str,
        chunk_bytes: int,
        counters: Counter[str],
    ) -> None:
        self._bound = MemoryShare(redis, fixed_bytes=bound_bytes, part=PART)
        self._ttl_ms = ttl_s * 1000
        self._prefix = prefix
        self._chunk_bytes = chunk_bytes
        self._make = redis.register_script(_MAKE)
        self._touch = redis.register_script(_TOUCH)
        self._forget = redis.register_script(_FORGET)
        self._counters = counters

    async def make(self, key: str, size: int) -> None:
        """Have room for an embedding's payload, which is written next.

        Raises:
            StoreFullError: it is larger than the bound.
        """
        bound = await self._bound.bytes()
        if 0 < bound < size:
            bound = await self._bound.bytes(again=True)
        if not bound:
            return
        if size > bound:
            raise StoreFullError(
                f"an embedding of {size} bytes is larger than all in the store may be together ({bound})"
            )
        args: list[str | int] = [
            key,
            size,
            bound,
            self._ttl_ms,
            self._prefix,
            self._chunk_bytes,
            _LAPSES,
        ]
        with redis_errors():
            evicted = int(await self._make(keys=[ORDER, SIZES], args=args))
        if evicted:
            self._counters["redis_evicted"] += evicted

    async def touch(self, key: str) -> bool:
        """An embedding was used, or written. False if it had to go meanwhile."""
        if not await self._bound.bytes():
            return True
        with redis_errors():
            return bool(await self._touch(keys=[ORDER, SIZES], args=[key, self._ttl_ms]))

    async def forget(self, key: str) -> None:
        """An embedding is no more."""
        if await self._bound.bytes():
            with redis_errors():
                await self._forget(keys=[ORDER, SIZES], args=[key])
