"""Values read from a real Valkey past redis-py: right, in order, over any kind of connection, or an error."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.exceptions
from redis.asyncio import Redis

from epd_cli.brokers import Brokers, embedded_brokers
from epd_common.errors import UnavailableError
from epd_common.store import Arena, Embedding, IntegrityError, RedisEmbeddingStore, open_redis
from epd_common.store.bulk_reader import READERS, BulkReader, Values
from epd_common.store.embedding import EmbeddingHeader, payload_checksum
from epd_common.store.redis_store import CHUNK_BYTES
from service_stack import eventually
from test_logins import certificate, valkey_with_tls

MOST = 1 << 20
TTL_S = 60


def copied(values: Values) -> list[bytes | None]:
    return [None if value is None else bytes(value) for value in values]


def first(values: Values) -> bytes:
    value = next(values)
    assert value is not None
    return bytes(value)


def embedding(size: int) -> Embedding:
    payload = os.urandom(size)
    header = EmbeddingHeader(
        key=secrets.token_hex(32),
        rows=size // 512,
        width=256,
        dtype="bfloat16",
        checksum=payload_checksum(payload),
    )
    return Embedding(header, memoryview(payload))


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[Brokers]:
    """A Valkey that a test may stop, with a TCP port."""
    async with embedded_brokers(tmp_path / "own", nats=False, redis_tcp=True) as brokers:
        yield brokers


@pytest.fixture
async def client(own: Brokers) -> AsyncIterator[Redis]:
    async with open_redis(own.redis_url) as opened:
        yield opened


@pytest.fixture
async def reader(client: Redis) -> AsyncIterator[BulkReader]:
    made = BulkReader(client, most_bytes=MOST)
    yield made
    await made.aclose()


async def filled(client: Redis, *sizes: int) -> tuple[list[str], list[bytes]]:
    names = [secrets.token_hex(8) for _ in sizes]
    values = [os.urandom(size) for size in sizes]
    for name, value in zip(names, values, strict=True):
        await client.set(name, value, ex=TTL_S)
    return names, values


async def test_values_come_in_order_and_live_longer(client: Redis, reader: BulkReader) -> None:
    names, values = await filled(client, MOST, 0, 5, MOST - 1, 3)
    got = await reader.read([*names, "none"], ttl_s=1000, take=copied)
    assert got == [*values, None]
    assert [900 < await client.ttl(name) <= 1000 for name in names] == [True] * 5


async def test_reads_at_the_same_time_do_not_mix(client: Redis, reader: BulkReader) -> None:
    names, values = await filled(client, *(300_000 + number for number in range(3 * READERS)))
    reads = [reader.read([name] * 4, ttl_s=TTL_S, take=copied) for name in names]
    assert await asyncio.gather(*reads) == [[value] * 4 for value in values]


async def test_what_was_not_read_to_its_end_is_not_taken_for_the_next_value(
    client: Redis, reader: BulkReader
) -> None:
    names, values = await filled(client, MOST, 100, 100)
    others = len(await client.client_list())

    async def is_closed() -> bool:
        return len(await client.client_list()) == others

    for _ in range(READERS):
        assert await reader.read(names, ttl_s=TTL_S, take=first) == values[0]
        await eventually(is_closed, "the connection, on which answers are still to come, is closed")
    assert await reader.read(names[1:], ttl_s=TTL_S, take=copied) == values[1:]


async def test_a_value_that_is_too_large_is_an_error_and_the_next_one_right(
    client: Redis, reader: BulkReader
) -> None:
    names, values = await filled(client, MOST + 1, 7)
    with pytest.raises(IntegrityError, match="more than 1048576"):
        await reader.read(names, ttl_s=TTL_S, take=copied)
    assert await reader.read(names[1:], ttl_s=TTL_S, take=copied) == values[1:]


async def test_a_refusal_is_an_error_and_the_next_one_right(
    client: Redis, reader: BulkReader
) -> None:
    names, values = await filled(client, 7)
    await client.lpush("list", "x")
    for _ in range(2 * READERS):
        with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
            await reader.read(["list", *names], ttl_s=TTL_S, take=copied)
    assert await reader.read(names, ttl_s=TTL_S, take=copied) == values


async def test_a_server_that_was_away_is_found_again(
    own: Brokers, client: Redis, reader: BulkReader
) -> None:
    names, values = await filled(client, 7)
    assert await reader.read(names, ttl_s=TTL_S, take=copied) == values
    await own.redis.stop()
    with pytest.raises(redis.exceptions.ConnectionError):
        await reader.read(names, ttl_s=TTL_S, take=copied)
    await own.redis.start()
    assert await reader.read(names, ttl_s=TTL_S, take=copied) == [None]


async def test_a_server_that_ends_in_the_middle_is_an_error(
    own: Brokers, client: Redis, reader: BulkReader
) -> None:
    names, _ = await filled(client, 7)
    await reader.read(names, ttl_s=TTL_S, take=copied)
    await client.execute_command("CLIENT", "PAUSE", "10000", "ALL")
    waiting = asyncio.create_task(reader.read(names, ttl_s=TTL_S, take=copied))
    await asyncio.sleep(0.2)  # until it has been sent; a shorter time tests less
    await own.redis.stop()
    async with asyncio.timeout(3):
        with pytest.raises(redis.exceptions.ConnectionError, match="the server closed"):
            await waiting


async def test_closing_ends_a_read_that_waits(own: Brokers, client: Redis) -> None:
    """It would hold the process up until its time is over."""
    reader = BulkReader(client, most_bytes=MOST)
    names, _ = await filled(client, 7)
    await reader.read(names, ttl_s=TTL_S, take=copied)
    await client.execute_command("CLIENT", "PAUSE", "4000", "ALL")
    waiting = asyncio.create_task(reader.read(names, ttl_s=TTL_S, take=copied))
    await asyncio.sleep(0.2)  # until it has been sent; a shorter time tests less
    assert not waiting.done()
    async with asyncio.timeout(2):
        await reader.aclose()
        with pytest.raises(redis.exceptions.ConnectionError):
            await waiting


async def test_the_store_over_tcp_as_a_pd_worker(own: Brokers, tmp_path: Path) -> None:
    async with open_redis(own.redis.url_for("encoder")) as writes:
        given = embedding(2 * CHUNK_BYTES + 512)
        await RedisEmbeddingStore(writes, ttl_s=TTL_S).put(given)
    login = own.redis.url_for("pd").partition("@")[0].removeprefix("unix://")
    address = own.redis.tcp_url.rpartition("@")[2]
    async with open_redis(f"redis://{login}@{address}") as reads:
        await _comes_whole(reads, given, tmp_path)


async def test_a_user_without_the_right_is_told_so(own: Brokers, client: Redis) -> None:
    given = embedding(512)
    await RedisEmbeddingStore(client, ttl_s=TTL_S).put(given)
    names = [f"epd:v1:emb:{given.header.key}:0"]
    async with open_redis(own.redis.url_for("gateway")) as stranger:
        reader = BulkReader(stranger, most_bytes=MOST)
        with pytest.raises(redis.exceptions.NoPermissionError):
            await reader.read(names, ttl_s=TTL_S, take=copied)
        await reader.aclose()


async def test_the_store_over_tls(brokers: Brokers, tmp_path: Path) -> None:
    given = embedding(2 * CHUNK_BYTES + 512)
    async with valkey_with_tls(brokers, tmp_path) as url:
        async with open_redis(url, ca=tmp_path / "ca.pem") as secured:
            await RedisEmbeddingStore(secured, ttl_s=TTL_S).put(given)
            await _comes_whole(secured, given, tmp_path)
            (tmp_path / "other").mkdir()
            certificate(tmp_path / "other", "localhost")
            (tmp_path / "other" / "ca.pem").replace(tmp_path / "ca.pem")
            store = RedisEmbeddingStore(secured, ttl_s=TTL_S)  # new connections are checked, too
            with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
                await store.get(given.header.key)
            await store.aclose()


async def _comes_whole(client: Redis, given: Embedding, folder: Path) -> None:
    store = RedisEmbeddingStore(client, ttl_s=TTL_S)
    arena = Arena(folder / "arena", quota_bytes=1 << 26, worker="w")
    arena.open()
    assert await store.bring(given.header.key, (), arena, lambda _: True) == given.header
    found = await arena.get(given.header.key)
    assert found is not None and bytes(found.payload) == bytes(given.payload)
    arena.close()
    await store.aclose()
