"""The table of sizes: none of it stays in Valkey for ever, whatever becomes of who wrote it."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from epd_common.store import SizeTable, open_redis
from epd_common.tasks import end

STEPS = 60
"""Of the event loop, more than a write has."""


@pytest.mark.slow
async def test_a_write_that_is_broken_off_leaves_nothing_without_an_end(redis_url: str) -> None:
    async with open_redis(redis_url) as redis:
        names = [secrets.token_hex(32) for _ in range(STEPS)]
        for step, name in enumerate(names):
            table = SizeTable(redis, name)
            writing = asyncio.ensure_future(table.add("image", 8, 8, {}, {}, 1))
            for _ in range(step):
                await asyncio.sleep(0.0001)
            await end(writing)
        left = [await redis.ttl(f"epd:v1:sizes:2:{name}") for name in names]
    assert set(left) - {-2}, "some were written"
    assert -1 not in left
