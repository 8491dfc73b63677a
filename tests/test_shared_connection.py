"""The connection to Valkey that commands share: whose answer is whose, whatever becomes of those who ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.exceptions
from redis.asyncio import ConnectionPool

from epd_common.store import open_redis
from epd_common.store.shared_connection import SHARED_BYTES, SharedConnection, SharingRedis

NAME = "epd-test:shared:"


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[SharingRedis]:
    async with open_redis(redis_url) as opened:
        assert isinstance(opened, SharingRedis)
        yield opened


async def connections(client: SharingRedis) -> set[str]:
    return {found["id"] for found in await client.client_list()}


async def test_everybody_gets_his_own_answer(client: SharingRedis) -> None:
    before = await connections(client)
    await asyncio.gather(*(client.hset(f"{NAME}{n}", "value", str(n).encode()) for n in range(100)))
    found = await asyncio.gather(*(client.hmget(f"{NAME}{n}", ["value"]) for n in range(100)))
    assert found == [[str(n).encode()] for n in range(100)]
    assert await client.expire(f"{NAME}1", 10) is True
    assert await client.expire(f"{NAME}none", 10) is False
    assert len(await connections(client) - before) == 1


async def test_who_was_cancelled_leaves_the_order_as_it_is(client: SharingRedis) -> None:
    await client.set(f"{NAME}a", b"x" * 7, ex=10)
    await client.set(f"{NAME}b", b"x" * 9, ex=10)
    gone = [asyncio.ensure_future(client.strlen(f"{NAME}a")) for _ in range(5)]
    stays = asyncio.ensure_future(client.strlen(f"{NAME}b"))
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    assert await stays == 9
    assert await client.strlen(f"{NAME}a") == 7


async def test_a_refusal_is_its_own_callers(client: SharingRedis) -> None:
    await client.set(f"{NAME}text", b"no hash", ex=10)
    before = await connections(client)
    wrong, right = await asyncio.gather(
        client.hset(f"{NAME}text", "a", "b"),
        client.exists(f"{NAME}text"),
        return_exceptions=True,
    )
    assert isinstance(wrong, redis.exceptions.ResponseError)
    assert right == 1
    assert await connections(client) == before, "nor does it cost the connection"


async def test_a_connection_that_broke_is_made_anew(client: SharingRedis) -> None:
    await client.exists(NAME)
    for _ in range(3):
        await client.client_kill_filter(_type="normal", skipme=True)
        assert await client.exists(NAME) == 0


async def test_what_is_large_has_a_connection_of_its_own(
    client: SharingRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        raise AssertionError("it was sent with others")

    monkeypatch.setattr(SharedConnection, "ask", never)
    assert await client.set(f"{NAME}large", bytes(SHARED_BYTES + 1), ex=10) is True
    assert await client.set(f"{NAME}view", memoryview(b"1"), ex=10) is True


async def test_who_gets_no_answer_is_told_so() -> None:
    held: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = ConnectionPool.from_url(f"redis://127.0.0.1:{port}?protocol=2", driver_info=None)
    shared = SharedConnection(pool, timeout_s=0.1)
    try:
        async with asyncio.timeout(10):
            found = await asyncio.gather(
                *(shared.ask(("EXISTS", "a")) for _ in range(3)), return_exceptions=True
            )
        assert all(isinstance(error, redis.exceptions.ConnectionError) for error in found), found
    finally:
        await shared.close()
        for writer in held:
            writer.close()
        server.close()
        await server.wait_closed()
