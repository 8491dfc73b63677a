"""A tenant of the media store, and what its account in Valkey says."""

from __future__ import annotations

import secrets

from redis.asyncio import Redis

from epd_common.store import MediaQuotas, MediaStore, StoredFile
from epd_common.store.quotas import ENTRY_BYTES, MediaQuota

TTL_S = 30
BOUND = 100 * ENTRY_BYTES


class Tenant:
    """A tenant that nobody else is, and what Valkey says of it."""

    def __init__(self, redis: Redis, bound: int = BOUND) -> None:
        self.redis = redis
        self.name = secrets.token_hex(6)
        self.refused: list[str] = []
        self.quotas = MediaQuotas(redis, bound_bytes=bound, refused=self.refused.append)
        self.store = MediaStore(redis, ttl_s=TTL_S, quotas=self.quotas)
        self.ends = f"epd:v1:held:{self.name}:ends"
        self.sizes = f"epd:v1:held:{self.name}:sizes"

    async def quota(self) -> MediaQuota:
        quota = await self.quotas.of(self.name)
        assert quota is not None
        return quota

    async def put(self, data: bytes, ref: str = "") -> str:
        ref = ref or secrets.token_hex(32)
        return await self.store.put(data, digest=ref, content_type="image/png", owner=self.name)

    async def upload(self, data: bytes) -> str:
        ref = await self.put(data)
        file = StoredFile(
            digest=ref, ref=ref, content_type="image/png", width=2, height=3, bytes=len(data)
        )
        made = await self.store.add_file(file, filename="a", purpose="vision", scope=self.name)
        return made.file_id

    async def sum(self) -> int:
        """What the account says, which must be what its entries say."""
        pipe = self.redis.pipeline()  # both at one moment
        pipe.hgetall(self.sizes)
        pipe.zrange(self.ends, 0, -1)
        found, names = await pipe.execute()
        sizes = {name: int(each) for name, each in found.items()}
        total = sizes.pop(b"sum", 0)
        assert total == sum(sizes.values())
        assert set(names) == set(sizes)
        return total

    async def true_ends(self) -> dict[str, int]:
        """When each entry lapses: the account's word, which must be Valkey's."""
        found = {
            name.decode(): int(end)
            for name, end in await self.redis.zrange(self.ends, 0, -1, withscores=True)
        }
        for name, end in found.items():
            assert await self.redis.pexpiretime(name) == end, name
        for account in (self.ends, self.sizes):
            assert await self.redis.pexpiretime(account) == max(found.values())
        return found

    async def age(self, name: str, left_ms: int) -> None:
        """As if the time of something had passed but for this."""
        seconds, micros = await self.redis.time()
        end = seconds * 1000 + micros // 1000 + left_ms
        await self.redis.zadd(self.ends, {name: end}, xx=True)
        await self.redis.pexpireat(name, end)
