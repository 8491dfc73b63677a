"""Room for embeddings in Valkey: what goes first, what stays, and sums that stay right. On a real Valkey."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from epd_cli.brokers import embedded_brokers
from epd_common.store import (
    Embedding,
    EmbeddingHeader,
    RedisEmbeddingStore,
    StoreFullError,
    open_redis,
)
from epd_common.store.embedding import payload_checksum
from epd_common.store.embedding_room import ORDER, SIZES

KB = 1 << 10
MB = 1 << 20
TTL_S = 60


def embedding(size: int, key: str = "") -> Embedding:
    payload = bytes([size % 251]) * size
    header = EmbeddingHeader(
        key=key or secrets.token_hex(32),
        fingerprint="f" * 64,
        dtype="bfloat16",
        rows=size // 32,
        width=16,
        metadata={},
        checksum=payload_checksum(payload),
    )
    return Embedding(header, memoryview(payload))


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[Redis]:
    """One of its own, as all embeddings of a Valkey share the room."""
    async with (
        embedded_brokers(tmp_path, nats=False, redis_maxmemory_bytes=64 * MB) as brokers,
        open_redis(brokers.redis_url) as client,
    ):
        yield client


def store_of(
    redis: Redis, bound: int = 0, ttl_s: int = TTL_S, counters: Counter[str] | None = None
) -> RedisEmbeddingStore:
    return RedisEmbeddingStore(redis, ttl_s=ttl_s, bound_bytes=bound, counters=counters)


async def put(store: RedisEmbeddingStore, size: int, key: str = "") -> str:
    made = embedding(size, key)
    await store.put(made)
    await asyncio.sleep(0.002)  # the order is by milliseconds
    return made.header.key


async def held(redis: Redis) -> tuple[set[str], int]:
    """Keys of the index, and their sum as it stands there, which must be right."""
    sizes = {name.decode(): int(value) for name, value in (await redis.hgetall(SIZES)).items()}
    total = sizes.pop("sum", 0)
    order = {name.decode() for name in await redis.zrange(ORDER, 0, -1)}
    assert order == set(sizes)
    assert total == sum(sizes.values())
    return order, total


async def test_the_least_recently_used_goes_with_all_its_chunks(redis: Redis) -> None:
    counters: Counter[str] = Counter()
    store = store_of(redis, bound=20 * MB, counters=counters)
    first, second = [await put(store, 9 * MB) for _ in range(2)]
    assert await store.get(first) is not None
    await asyncio.sleep(0.002)
    third = await put(store, 9 * MB)
    assert [await store.contains(key) for key in (first, second, third)] == [True, False, True]
    left = [name async for name in redis.scan_iter(match=f"epd:v1:emb:{second}*")]
    assert left == []
    assert await held(redis) == ({first, third}, 18 * MB)
    assert counters["redis_evicted"] == 1


async def test_looking_for_one_is_a_use(redis: Redis) -> None:
    store = store_of(redis, bound=2 * MB)
    first, second = [await put(store, MB) for _ in range(2)]
    assert await store.contains(first)
    await asyncio.sleep(0.002)
    await put(store, MB)
    assert [await store.contains(key) for key in (first, second)] == [True, False]


async def test_workers_share_the_room(redis: Redis) -> None:
    one, other = store_of(redis, bound=MB), store_of(redis, bound=MB)
    async with asyncio.TaskGroup() as group:
        for store in (one, other):
            for _ in range(20):
                group.create_task(put(store, MB // 4))
    keys, total = await held(redis)
    assert (len(keys), total) == (4, MB)
    assert await one.used_bytes() <= MB + 4 * 4096, "none that was evicted while it was written"


async def test_by_default_half_of_what_valkey_may_hold(redis: Redis) -> None:
    store = store_of(redis)
    for _ in range(40):
        await put(store, MB)
    assert (await held(redis))[1] == 32 * MB
    assert not (await redis.config_get("maxmemory-policy"))["maxmemory-policy"].startswith("all")
    await redis.set("others have the rest", bytes(8 * MB))


async def test_without_a_bound_there_is_no_index(redis: Redis) -> None:
    await redis.config_set("maxmemory", 0)
    store = store_of(redis)
    key = await put(store, KB)
    assert await store.contains(key)
    assert await redis.exists(ORDER) == 0


async def test_one_that_never_fits(redis: Redis) -> None:
    store = store_of(redis, bound=MB)
    kept = await put(store, MB)
    with pytest.raises(StoreFullError, match="larger than all"):
        await put(store, MB + 32)
    assert await store.contains(kept), "nothing had to go for it"


async def test_more_memory_counts_at_once_for_what_did_not_fit(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_common.store.maxmemory.LOOK_AGAIN_S", 0.0)
    store = store_of(redis)
    await redis.config_set("maxmemory", MB)
    with pytest.raises(StoreFullError):
        await put(store, MB)
    await redis.config_set("maxmemory", 64 * MB)
    assert await store.contains(await put(store, MB))


async def test_what_lapsed_is_forgotten_and_what_is_deleted(redis: Redis) -> None:
    counters: Counter[str] = Counter()
    store = store_of(redis, bound=10 * MB, ttl_s=1, counters=counters)
    lapsed, deleted = await put(store, MB), await put(store, MB)
    await store.delete(deleted)
    assert await held(redis) == ({lapsed}, MB)
    await asyncio.sleep(1.1)
    fresh = await put(store, MB)
    assert await held(redis) == ({fresh}, MB)
    assert not counters["redis_evicted"]


@pytest.mark.parametrize("seed", range(3))
async def test_as_a_model_has_it(redis: Redis, seed: int) -> None:
    rng = random.Random(seed)
    bound = 40 * KB
    store = store_of(redis, bound=bound)
    model: OrderedDict[str, int] = OrderedDict()
    for number in range(150):
        key = f"{rng.randrange(30):064d}"
        match rng.choice(("put", "put", "get", "delete")):
            case "put":
                size = 32 * rng.randint(1, 400)
                model.pop(key, None)
                while sum(model.values()) + size > bound:
                    model.popitem(last=False)
                model[key] = size
                await put(store, size, key)
            case "get":
                found = await store.get(key)
                assert (found is not None) == (key in model), number
                if key in model:
                    model.move_to_end(key)
                await asyncio.sleep(0.002)
            case "delete":
                await store.delete(key)
                model.pop(key, None)
        assert await held(redis) == (set(model), sum(model.values())), number
