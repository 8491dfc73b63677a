"""The state of every key: missing, pending, ready or failed; and who may start an encode.

Single-flight across the cluster (invariant I4) is one atomic step in Redis: whoever claims a key that
nobody encodes gets a new *epoch* and publishes the encode job; everybody else is told the epoch under way.
An epoch that is over changes nothing any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from redis.asyncio import Redis

from epd_common.protocol.codec import decode, encode
from epd_common.protocol.events import EmbeddingEvent
from epd_common.store.redis_client import redis_errors

ClaimState = Literal["claimed", "pending", "ready", "failed"]
_PREFIX = "epd:v1:state:"
_BEGUN = "epd:v1:begun:"
BEGUN_TTL_S = 600

# KEYS: state names. ARGV: lease in ms, whether it is a rescue ('1'), then per key the epoch that its caller
# found to be of no use (0: none). An epoch is the server's time in ms, pushed on where two fall into one.
_CLAIM = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local answers = {}
for i, name in ipairs(KEYS) do
  local found = redis.call('HMGET', name, 'state', 'epoch', 'event', 'until', 'rescue')
  local state, epoch = found[1], tonumber(found[2] or '0')
  local useless = tonumber(ARGV[i + 2])
  local free = not state or epoch == useless
    or (state == 'pending' and tonumber(found[4]) <= now)
  if free then
    epoch = math.max(now, epoch + 1)
    redis.call('DEL', name)
    redis.call('HSET', name, 'state', 'pending', 'epoch', epoch, 'until', now + tonumber(ARGV[1]),
      'rescue', ARGV[2])
    redis.call('PEXPIRE', name, 10 * tonumber(ARGV[1]))
    answers[i] = {'claimed', epoch, '', ARGV[2]}
  else
    answers[i] = {state, epoch, found[3] or '', found[5] or '0'}
  end
end
return answers
"""

# KEYS: one state name. ARGV: epoch, state, event, ttl in ms (0: forget the key).
_FINISH = """
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if epoch > tonumber(ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1])
if ARGV[4] == '0' then return 1 end
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'epoch', ARGV[1], 'event', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
"""

# KEYS: one state name. ARGV: epoch, lease in ms.
_BEGIN = """
local found = redis.call('HMGET', KEYS[1], 'state', 'epoch')
if found[1] and tonumber(found[2]) > tonumber(ARGV[1]) then return 0 end
if found[1] and found[1] ~= 'pending' then return 1 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], 'state', 'pending', 'epoch', ARGV[1], 'until', now + tonumber(ARGV[2]))
redis.call('PEXPIRE', KEYS[1], 10 * tonumber(ARGV[2]))
return 1
"""

# KEYS: one state name. ARGV: epoch, event.
_SIZE = """
local found = redis.call('HMGET', KEYS[1], 'state', 'epoch')
if found[1] ~= 'pending' or found[2] ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'event', ARGV[2])
return 1
"""

# KEYS: one state name. ARGV: epoch.
_ABANDON = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""

FAILED_TTL_S = 10.0
"""How long bytes that cannot be encoded are remembered as such. Other failures are not: the next who asks
has them tried again."""


OTHERS_MAY_SUCCEED = ("media_gone", "key_mismatch")
"""Failures of one job, which another job for the same key need not have."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim found. ``claimed`` means: publish the encode job, with this epoch.

    ``event`` is the last one of this epoch: ``ready``, ``failed``, or ``sized`` while it is pending.
    ``rescue`` says that a PD worker has taken the encode over.
    """

    state: ClaimState
    epoch: int
    event: EmbeddingEvent | None = None
    rescue: bool = False


class KeyStates:
    """Key states in Redis.

    Args:
        lease_s: A pending encode that is not finished by then may be claimed again.
        ready_ttl_s: How long a ready state is remembered; a wrong memory costs one more look.
    """

    def __init__(self, redis: Redis, *, lease_s: float, ready_ttl_s: float) -> None:
        self._redis = redis
        self._lease_ms = int(lease_s * 1000)
        self._ready_ms = int(ready_ttl_s * 1000)
        self._claim = redis.register_script(_CLAIM)
        self._finish = redis.register_script(_FINISH)
        self._begin = redis.register_script(_BEGIN)
        self._size = redis.register_script(_SIZE)
        self._abandon = redis.register_script(_ABANDON)

    async def claim(
        self,
        keys: Sequence[str],
        *,
        useless: Mapping[str, int] | None = None,
        rescue: bool = False,
    ) -> list[Claim]:
        """Look all keys up in one round trip and claim those that nobody has or makes.

        Args:
            useless: Epochs, by key, whose result the caller could not use (evicted, damaged, lost): they
                count as missing. Only the first caller to say so claims; the others join.
            rescue: The caller will encode what it claims itself, and not publish a job.
        """
        if not keys:
            return []
        args = [
            self._lease_ms,
            int(rescue),
            *((useless or {}).get(key, 0) for key in keys),
        ]
        with redis_errors():
            answers = await self._claim(keys=[_PREFIX + key for key in keys], args=args)
        return [
            Claim(
                state.decode(),
                int(epoch),
                decode(event, EmbeddingEvent) if event else None,
                rescue == b"1",
            )
            for state, epoch, event, rescue in answers
        ]

    async def read(self, keys: Sequence[str]) -> list[Claim | None]:
        """The states as they are; None for a key that nobody knows."""
        with redis_errors():
            pipe = self._redis.pipeline(transaction=False)
            for key in keys:
                pipe.hmget(_PREFIX + key, "state", "epoch", "event", "rescue")
            rows = await pipe.execute()
        return [
            Claim(
                state.decode(),
                int(epoch),
                decode(event, EmbeddingEvent) if event else None,
                rescue == b"1",
            )
            if state
            else None
            for state, epoch, event, rescue in rows
        ]

    async def begin(self, key: str, epoch: int) -> bool:
        """Start the work of a claim: its lease begins anew, however long its job was queued.

        False if a newer epoch is under way: whoever waits, waits for that one.
        """
        with redis_errors():
            args = [epoch, self._lease_ms]
            return bool(await self._begin(keys=[_PREFIX + key], args=args))

    async def size(self, event: EmbeddingEvent) -> bool:
        """Note the metadata of a pending item, for those who come later. False if it is not pending."""
        with redis_errors():
            return bool(
                await self._size(keys=[_PREFIX + event.key], args=[event.epoch, encode(event)])
            )

    async def finish(self, event: EmbeddingEvent) -> bool:
        """Record a ready or failed event. False if a newer epoch is under way: then it changes nothing."""
        ttl_ms = self._ready_ms
        if event.state == "failed":
            remembered = event.status < 500 and event.code not in OTHERS_MAY_SUCCEED
            ttl_ms = int(FAILED_TTL_S * 1000) if remembered else 0
        with redis_errors():
            done = await self._finish(
                keys=[_PREFIX + event.key], args=[event.epoch, event.state, encode(event), ttl_ms]
            )
        return bool(done)

    async def note_beginning(self, key: str) -> int:
        """The encode of a key begins; how many beginnings have no end by now, this one included."""
        name = f"{_BEGUN}{key}"
        with redis_errors():
            count = int(await self._redis.incr(name))
            await self._redis.expire(name, BEGUN_TTL_S)
        return count

    async def note_end(self, key: str) -> None:
        """It ended, in whatever way, and whoever did it lives."""
        name = f"{_BEGUN}{key}"
        with redis_errors():
            if int(await self._redis.decr(name)) <= 0:
                await self._redis.delete(name)

    async def beginnings(self, key: str) -> int:
        """Beginnings that have no end."""
        with redis_errors():
            return int(await self._redis.get(f"{_BEGUN}{key}") or 0)

    async def abandon(self, key: str, epoch: int) -> None:
        """Give a claim back, when its encode job could not be published."""
        with redis_errors():
            await self._abandon(keys=[_PREFIX + key], args=[epoch])
