"""The state of every key: missing, pending, ready or failed; and who may start an encode.

Single-flight across the cluster (invariant I4) is one atomic step in Redis: whoever claims a key that
nobody encodes gets a new *epoch* and publishes the encode job; everybody else is told the epoch under way.
An epoch that is over changes nothing any more.

Beside each pending key stands who waits for it, as marks with an end, and which job in the queue is to make
it, so that a job which nobody wants any more is taken off the queue, or dropped where an encoder takes it.
Why a request that joins gets its embedding all the same, whenever another one lets go: marks are set by the
same script that says ``pending``, and looked at by the same script that frees the key. Either the mark is
there when an encoder looks, or the last one who lets go: then the job stays. Or they have looked before, and
then the key was free when the claim came: it is a new claim, with a job of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from redis.asyncio import Redis

from epd_common.errors import RequestCancelledError
from epd_common.protocol.codec import decode, encode
from epd_common.protocol.events import EmbeddingEvent
from epd_common.store.redis_client import redis_errors

ClaimState = Literal["claimed", "pending", "ready", "failed"]
_PREFIX = "epd:v1:state:"
_WAITING = "epd:v1:waiting:"

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

# A key that nobody has or makes. Its epoch stays for a while: a job of it that is still under way is known by
# that, and the next claim gets a higher one also within the same millisecond.
_FREE = """
local function free(name, epoch)
  redis.call('DEL', name)
  redis.call('HSET', name, 'epoch', epoch)
  redis.call('PEXPIRE', name, 60000)
end
local function unwanted(waited, waiting)
  return waited == '1' and redis.call('ZCOUNT', waiting, '(' .. now, '+inf') == 0
end
"""

# KEYS: state names, then the names of who waits. ARGV: lease in ms, whether it is a rescue ('1'), who waits
# ('': not told) and for how many ms at most, then per key the epoch that its caller found to be of no use
# (0: none). An epoch is the server's time in ms, pushed on where two fall into one. The marks of others stay
# when a key is claimed anew: they wait for the new epoch.
_CLAIM = (
    _NOW
    + """
local answers = {}
local count = #KEYS / 2
for i = 1, count do
  local name, waiting = KEYS[i], KEYS[count + i]
  local found = redis.call('HMGET', name, 'state', 'epoch', 'event', 'until', 'rescue')
  local state, epoch = found[1], tonumber(found[2] or '0')
  local useless = tonumber(ARGV[i + 4])
  local free = not state or epoch == useless
    or (state == 'pending' and tonumber(found[4]) <= now)
  if free then
    epoch = math.max(now, epoch + 1)
    redis.call('DEL', name)
    redis.call('HSET', name, 'state', 'pending', 'epoch', epoch, 'until', now + tonumber(ARGV[1]),
      'rescue', ARGV[2], 'waited', ARGV[3] == '' and '0' or '1')
    redis.call('PEXPIRE', name, 10 * tonumber(ARGV[1]))
    answers[i] = {'claimed', epoch, '', ARGV[2]}
  else
    answers[i] = {state, epoch, found[3] or '', found[5] or '0'}
  end
  if ARGV[3] ~= '' and (free or state == 'pending') then
    redis.call('ZADD', waiting, now + tonumber(ARGV[4]), ARGV[3])
    if redis.call('PTTL', waiting) < tonumber(ARGV[4]) then redis.call('PEXPIRE', waiting, ARGV[4]) end
  end
end
return answers
"""
)

# KEYS: state, who waits. ARGV: epoch, state, event, ttl in ms (0: forget the key).
_FINISH = """
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if epoch > tonumber(ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1])
redis.call('DEL', KEYS[2])
if ARGV[4] == '0' then return 1 end
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'epoch', ARGV[1], 'event', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
"""

_GO, _UNWANTED = 1, 2  # what the next two scripts return; 0: not this epoch any more

# KEYS: state, who waits. ARGV: epoch, lease in ms. A key of which Redis knows nothing may have been lost with
# who waits for it, so its job is done.
_BEGIN = (
    _NOW
    + _FREE
    + """
local found = redis.call('HMGET', KEYS[1], 'state', 'epoch', 'waited')
local epoch = tonumber(found[2] or '0')
if epoch > tonumber(ARGV[1]) then return 0 end
if found[1] and found[1] ~= 'pending' then return 1 end
if epoch == tonumber(ARGV[1]) then
  if not found[1] then return 2 end
  if unwanted(found[3], KEYS[2]) then
    free(KEYS[1], ARGV[1])
    return 2
  end
end
redis.call('HSET', KEYS[1], 'state', 'pending', 'epoch', ARGV[1], 'until', now + tonumber(ARGV[2]),
  'begun', '1')
redis.call('PEXPIRE', KEYS[1], 10 * tonumber(ARGV[2]))
return 1
"""
)

# KEYS: state, who waits. ARGV: epoch, the job's number in its queue.
_PUBLISHED = (
    _NOW
    + _FREE
    + """
local found = redis.call('HMGET', KEYS[1], 'state', 'epoch', 'waited', 'begun')
if found[1] ~= 'pending' or found[2] ~= ARGV[1] or found[4] then return 1 end
if unwanted(found[3], KEYS[2]) then
  free(KEYS[1], ARGV[1])
  return 2
end
redis.call('HSET', KEYS[1], 'job', ARGV[2])
return 1
"""
)

# KEYS: state names, then the names of who waits. ARGV: who lets go. The numbers of jobs that nobody wants now
# and nobody has begun.
_LET_GO = (
    _NOW
    + _FREE
    + """
local jobs = {}
local count = #KEYS / 2
for i = 1, count do
  local name, waiting = KEYS[i], KEYS[count + i]
  redis.call('ZREM', waiting, ARGV[1])
  local found = redis.call('HMGET', name, 'state', 'epoch', 'waited', 'begun', 'job')
  if found[1] == 'pending' and not found[4] and found[5] and unwanted(found[3], waiting) then
    free(name, found[2])
    jobs[#jobs + 1] = tonumber(found[5])
  end
end
return jobs
"""
)

# KEYS: state, who waits. ARGV: epoch, event.
_SIZE = (
    _NOW
    + _FREE
    + """
local found = redis.call('HMGET', KEYS[1], 'state', 'epoch', 'waited')
if found[1] ~= 'pending' or found[2] ~= ARGV[1] then return 0 end
if unwanted(found[3], KEYS[2]) then
  free(KEYS[1], ARGV[1])
  return 2
end
redis.call('HSET', KEYS[1], 'event', ARGV[2])
return 1
"""
)

# KEYS: one state name. ARGV: epoch.
_ABANDON = (
    _FREE
    + """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
free(KEYS[1], ARGV[1])
return 1
"""
)

FAILED_TTL_S = 10.0
"""How long bytes that cannot be encoded are remembered as such. Other failures are not: the next who asks
has them tried again."""


OTHERS_MAY_SUCCEED = ("media_gone", "key_mismatch")
"""Failures of one job, which another job for the same key need not have."""


class UnwantedError(RequestCancelledError):
    """Nobody waits for an item any more, so it is not encoded. Whoever asks next orders it anew."""

    default_code = "unwanted"


@dataclass(frozen=True, slots=True)
class Waiter:
    """Who waits for what it claims.

    Attributes:
        name: The request's id; the same one waits once.
        within_s: After so many seconds it waits no longer, whatever has become of it.
    """

    name: str
    within_s: float


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
        self._published = redis.register_script(_PUBLISHED)
        self._let_go = redis.register_script(_LET_GO)

    async def claim(
        self,
        keys: Sequence[str],
        *,
        useless: Mapping[str, int] | None = None,
        rescue: bool = False,
        waiter: Waiter | None = None,
    ) -> list[Claim]:
        """Look all keys up in one round trip and claim those that nobody has or makes.

        Args:
            waiter: Waits for those that are not there yet, until they come, time is over or :meth:`let_go`.
                What is claimed for nobody is always encoded.
            useless: Epochs, by key, whose result the caller could not use (evicted, damaged, lost): they
                count as missing. Only the first caller to say so claims; the others join.
            rescue: The caller will encode what it claims itself, and not publish a job.
        """
        if not keys:
            return []
        args: list[int | str] = [
            self._lease_ms,
            int(rescue),
            waiter.name if waiter is not None else "",
            max(1, int(waiter.within_s * 1000)) if waiter is not None else 0,
            *((useless or {}).get(key, 0) for key in keys),
        ]
        names = [_PREFIX + key for key in keys] + [_WAITING + key for key in keys]
        with redis_errors():
            answers = await self._claim(keys=names, args=args)
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

        Raises:
            UnwantedError: nobody waits any more, or the claim was given back.
        """
        with redis_errors():
            said = await self._begin(keys=_names(key), args=[epoch, self._lease_ms])
        return _wanted(key, int(said))

    async def size(self, event: EmbeddingEvent) -> bool:
        """Note the metadata of a pending item, for those who come later. False if it is not pending.

        Raises:
            UnwantedError: nobody waits any more: it need not enter the engine.
        """
        with redis_errors():
            said = await self._size(keys=_names(event.key), args=[event.epoch, encode(event)])
        return _wanted(event.key, int(said))

    async def finish(self, event: EmbeddingEvent) -> bool:
        """Record a ready or failed event. False if a newer epoch is under way: then it changes nothing."""
        ttl_ms = self._ready_ms
        if event.state == "failed":
            remembered = event.status < 500 and event.code not in OTHERS_MAY_SUCCEED
            ttl_ms = int(FAILED_TTL_S * 1000) if remembered else 0
        with redis_errors():
            done = await self._finish(
                keys=_names(event.key), args=[event.epoch, event.state, encode(event), ttl_ms]
            )
        return bool(done)

    async def abandon(self, key: str, epoch: int) -> None:
        """Give a claim back, when its encode job could not be published."""
        with redis_errors():
            await self._abandon(keys=[_PREFIX + key], args=[epoch])

    async def published(self, key: str, epoch: int, job: int) -> bool:
        """Note which job in the queue is to make a claimed key.

        False if all who waited have let go meanwhile: then the key is free, and the job for nobody.
        """
        with redis_errors():
            return int(await self._published(keys=_names(key), args=[epoch, job])) != _UNWANTED

    async def let_go(self, keys: Sequence[str], waiter: str) -> list[int]:
        """Somebody waits for none of these any more.

        Returns:
            Numbers of jobs in the queue that nobody wants now; their keys are free. One that an encoder has
            begun is not among them: the encoder looks itself, before the item enters its engine.
        """
        if not keys:
            return []
        names = [_PREFIX + key for key in keys] + [_WAITING + key for key in keys]
        with redis_errors():
            return [int(job) for job in await self._let_go(keys=names, args=[waiter])]


def _names(key: str) -> list[str]:
    return [_PREFIX + key, _WAITING + key]


def _wanted(key: str, said: int) -> bool:
    if said == _UNWANTED:
        raise UnwantedError(f"nobody waits for item {key} any more", stage="encode", key=key)
    return said == _GO
