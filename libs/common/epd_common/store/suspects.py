"""Items that were in work when an engine or a process died: one of them may have killed it.

Two counts a key, each with an end: encodes that began beside others and did not end, and those that did not
end although nothing else was in the engine. The first makes an item a suspect, which is encoded alone from
then on; the second alone is held against it. An item's success clears it.
"""

from __future__ import annotations

from dataclasses import dataclass

from redis.asyncio import Redis

from epd_common.store.redis_client import redis_errors

_BEGUN = "epd:v1:begun:"
REMEMBERED_S = 600
"""Counts go so long after the last beginning; to look at them does not renew them."""

DEATHS_ALONE = 2
"""Twice, as an engine or a process may die for reasons that are not the item's."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is known of an item: encodes without an end, ``beside`` others and ``alone``."""

    beside: int
    alone: int

    @property
    def suspect(self) -> bool:
        """Whether it must be encoded alone, so that no other item is suspected with it."""
        return self.beside > 0 or self.alone > 0

    @property
    def proved(self) -> bool:
        """Whether it is the item that kills."""
        return self.alone >= DEATHS_ALONE


class Suspects:
    """Beginnings and ends of encodes, in Redis, as they must outlive who encodes."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def look(self, key: str) -> Suspicion:
        """What is known of an item."""
        with redis_errors():
            pipe = self._redis.pipeline(transaction=False)
            for alone in (False, True):
                pipe.get(_name(key, alone))
            beside, alone_ = await pipe.execute()
        return Suspicion(int(beside or 0), int(alone_ or 0))

    async def begin(self, key: str, *, alone: bool) -> None:
        """Its encode begins; noted before, as nobody can note it when the process is killed."""
        with redis_errors():
            pipe = self._redis.pipeline(transaction=False)
            pipe.incr(_name(key, alone))
            pipe.expire(_name(key, alone), REMEMBERED_S)
            await pipe.execute()

    async def end(self, key: str, *, alone: bool) -> None:
        """It ended without an embedding, and the engine lives."""
        with redis_errors():
            if int(await self._redis.decr(_name(key, alone))) <= 0:
                await self._redis.delete(_name(key, alone))

    async def died_alone(self, key: str) -> None:
        """It began beside others, or might have, and when the engine died it was alone there."""
        await self.end(key, alone=False)
        await self.begin(key, alone=True)

    async def clear(self, key: str) -> None:
        """It was encoded, so it kills nobody."""
        with redis_errors():
            await self._redis.delete(_name(key, False), _name(key, True))


def _name(key: str, alone: bool) -> str:
    return f"{_BEGUN}{key}:alone" if alone else f"{_BEGUN}{key}"
