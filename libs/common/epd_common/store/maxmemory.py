"""A part of what Valkey may hold, as a bound for those who share it."""

from __future__ import annotations

import time

from redis.asyncio import Redis

from epd_common.store.redis_client import redis_errors

LOOK_S, LOOK_AGAIN_S = 60.0, 1.0
"""Seconds between looks at ``maxmemory``, which may be changed while Valkey runs; where the last look stands
in the way of something, it is looked at sooner."""


class MemoryShare:
    """A bound in bytes.

    Args:
        fixed_bytes: What an operator has set; 0: a part of Valkey's ``maxmemory``.
        part: One in so many bytes of it.
    """

    def __init__(self, redis: Redis, *, fixed_bytes: int, part: int) -> None:
        self._redis = redis
        self._fixed = fixed_bytes
        self._part = part
        self._share: int | None = None
        self._looked = 0.0

    async def bytes(self, *, again: bool = False) -> int:
        """The bound; 0: there is none.

        Args:
            again: What was seen a while ago does not do.

        Raises:
            UnavailableError: Valkey does not answer.
        """
        if self._fixed:
            return self._fixed
        now = time.monotonic()
        due = self._looked + (LOOK_AGAIN_S if again else LOOK_S)
        if self._share is None or now >= due:
            self._looked = now  # at once: others go by what was seen before
            with redis_errors():
                found = await self._redis.info("memory")
            self._share = -(-int(found.get("maxmemory", 0)) // self._part)
        return self._share
