"""What each tenant has in the media store at one time, in bytes, and the bound on it.

An account is two keys in Valkey: a sorted set (name of what is kept -> its end in ms) and a hash (name ->
bytes, and their sum). The end in an account is the end of what is kept, to the millisecond, as one script
sets both: so nothing that a tenant put is there without being charged, and nothing stays charged that has
gone. Bytes that several tenants put are kept once and charged to each of them.

Every path that gives bytes a longer life must go through here; reading them gives them none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from epd_common.errors import BusyError, EpdError, TooLargeError
from epd_common.store.base import StoreFullError
from epd_common.store.maxmemory import MemoryShare
from epd_common.store.redis_client import redis_errors

CODE = "tenant_over_media_bytes"
SHARE = 4
"""Where no bound is set a tenant may have this part of Valkey's ``maxmemory``: one in so many."""

ENTRY_BYTES = 1024
"""Charged for each entry beside its bytes. Measured in Valkey 9.1: a picture of 70 bytes takes 490, of which
the account's entries are 260; an upload's record takes about 400 beside its own bytes."""

RETRY_BOUNDS_S = (1.0, 60.0)

_PREFIX = "epd:v1:held:"
_LAPSES = 1000
"""Entries that one call takes out whose time is over; that takes Valkey about a millisecond."""

# What all scripts share. KEYS: ends (name -> end in ms), sizes (name -> bytes, 'sum'), then what is kept.
_COMMON = """
local ends, sizes = KEYS[1], KEYS[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function take_out(names)
  if #names == 0 then return end
  local freed = 0
  for _, bytes in ipairs(redis.call('HMGET', sizes, unpack(names))) do
    freed = freed + (tonumber(bytes) or 0)
  end
  redis.call('ZREM', ends, unpack(names))
  if freed == 0 then return end
  redis.call('HDEL', sizes, unpack(names))
  redis.call('HINCRBY', sizes, 'sum', -freed)
end
local function lapse(most)
  local before = '(' .. string.format('%.0f', now)
  take_out(redis.call('ZRANGEBYSCORE', ends, '-inf', before, 'LIMIT', 0, most))
end
local function charge(name, bytes, till)
  if redis.call('ZADD', ends, till, name) == 1 then
    redis.call('HSET', sizes, name, bytes)
    redis.call('HINCRBY', sizes, 'sum', bytes)
  end
  local last = redis.call('ZRANGE', ends, -1, -1, 'WITHSCORES')[2]
  redis.call('PEXPIREAT', ends, last)
  redis.call('PEXPIREAT', sizes, last)
end
"""

# ARGV: lapses, time to live in ms, bytes, bound. Where the bytes are not there they are to be sent now.
# What is refused gets no longer life. PEXPIREAT goes before what takes memory: after a first write a script
# may go on writing also where Valkey is full.
_ADMIT = (
    _COMMON
    + """
lapse(ARGV[1])
local till, bytes = now + tonumber(ARGV[2]), tonumber(ARGV[3])
if not redis.call('ZSCORE', ends, KEYS[3]) then
  local sum = tonumber(redis.call('HGET', sizes, 'sum') or 0)
  if sum + bytes > tonumber(ARGV[4]) then
    local first = redis.call('ZRANGE', ends, 0, 0, 'WITHSCORES')[2]
    return {0, sum, tonumber(first or now) - now}
  end
end
local there = redis.call('PEXPIREAT', KEYS[3], till)
charge(KEYS[3], bytes, till)
return {1, there, till}
"""
)

# ARGV: lapses, time to live in ms, then the bytes of each. Nothing is refused: it is there already.
_RENEW = (
    _COMMON
    + """
lapse(ARGV[1])
local till, there = now + tonumber(ARGV[2]), {}
for i = 3, #KEYS do
  there[i - 2] = redis.call('PEXPIREAT', KEYS[i], till)
  if there[i - 2] == 1 then charge(KEYS[i], tonumber(ARGV[i]), till) end
end
return there
"""
)

_DROP = (
    _COMMON
    + """
take_out({KEYS[3]})
return redis.call('DEL', KEYS[3])
"""
)

# For bytes that Valkey had no room for; if another request brought them meanwhile, they stay charged.
_UNDO = _COMMON + "if redis.call('EXISTS', KEYS[3]) == 0 then take_out({KEYS[3]}) end"


@dataclass(frozen=True, slots=True)
class Kept:
    """Something in the media store: its key in Valkey, and its bytes."""

    name: str
    bytes: int


class MediaQuotas:
    """The quotas of all tenants.

    Args:
        bound_bytes: What each may have at once; 0: a part (:data:`SHARE`) of Valkey's ``maxmemory``, and no
            bound where it has none.
        refused: Told each time of the tenant that was refused.
    """

    def __init__(self, redis: Redis, *, bound_bytes: int, refused: Callable[[str], None]) -> None:
        self._redis = redis
        self.bound = MemoryShare(redis, fixed_bytes=bound_bytes, part=SHARE)
        self.refused = refused
        self.admit = redis.register_script(_ADMIT)
        self.renew = redis.register_script(_RENEW)
        self.drop = redis.register_script(_DROP)
        self.undo = redis.register_script(_UNDO)

    async def of(self, tenant: str) -> MediaQuota | None:
        """A tenant's quota; None where there is no bound, or no tenant."""
        if not tenant or not (bound := await self.bound.bytes()):
            return None
        return MediaQuota(self, self._redis, tenant, bound)


class MediaQuota:
    """One tenant's account and bound. Made by :meth:`MediaQuotas.of`."""

    def __init__(self, all_: MediaQuotas, redis: Redis, tenant: str, bound: int) -> None:
        self._all = all_
        self._redis = redis
        self._tenant = tenant
        self._bound = bound
        self._account = [f"{_PREFIX}{tenant}:ends", f"{_PREFIX}{tenant}:sizes"]

    async def keep(self, name: str, data: bytes, *, ttl_s: int) -> None:
        """Charge and store bytes. If they are there already, that is one round trip without them.

        Raises:
            BusyError, TooLargeError: ``tenant_over_media_bytes``.
            StoreFullError: Valkey has no room for them.
        """
        kept, first, second = 0, 0, 0
        while not kept:
            args = [_LAPSES, ttl_s * 1000, len(data) + ENTRY_BYTES, self._bound]
            with redis_errors():
                kept, first, second = await self._all.admit(keys=[*self._account, name], args=args)
            if not kept and second >= 0:  # else more has lapsed than one call takes out
                self._all.refused(self._tenant)
                raise self._refusal(len(data), has=first, first_goes_s=second / 1000)
        there, till_ms = first, second
        if there:
            return
        try:
            with redis_errors():
                await self._redis.set(name, data, pxat=till_ms)
        except StoreFullError:
            with contextlib.suppress(EpdError), redis_errors():
                await self._all.undo(keys=[*self._account, name])
            raise

    async def renew(self, kept: Sequence[Kept], *, ttl_s: int) -> list[bool]:
        """Give things a new time to live, in Valkey and in the account; which of them were there."""
        args = [_LAPSES, ttl_s * 1000, *(each.bytes + ENTRY_BYTES for each in kept)]
        names = [each.name for each in kept]
        with redis_errors():
            found = await self._all.renew(keys=[*self._account, *names], args=args)
        return [there == 1 for there in found]

    async def drop(self, name: str) -> bool:
        """Delete something and give back its charge; False if it was not there."""
        with redis_errors():
            return bool(await self._all.drop(keys=[*self._account, name]))

    def _refusal(self, wanted: int, *, has: int, first_goes_s: float) -> EpdError:
        if wanted + ENTRY_BYTES > self._bound:
            return TooLargeError(
                f"this has {wanted} bytes, and pictures, recordings and large texts of tenant "
                f"{self._tenant!r} may have {self._bound} together; send a smaller one",
                code=CODE,
                stage="ingest",
            )
        low, high = RETRY_BOUNDS_S
        return BusyError(
            f"tenant {self._tenant!r} has {has} bytes of pictures, recordings and large texts in the "
            f"media store, {self._bound} may be there at once, and this one has {wanted}; send fewer or "
            "smaller ones, or wait until some have gone: each does some time after it was last used",
            code=CODE,
            stage="ingest",
            retry_after_s=min(max(first_goes_s, low), high),
        )
