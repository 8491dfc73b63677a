"""The ways of ``bench.store``: what one process does with one embedding, as the services do it.

A way's first part makes the state that it needs and is not timed; the second is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import msgspec
import redis
import uvloop

from epd_common.protocol import Locator
from epd_common.store import Arena, Embedding, EmbeddingHeader, RedisEmbeddingStore, open_redis
from epd_common.store.arena import map_embedding
from epd_common.store.bulk_reader import BulkReader, Values
from epd_common.store.embedding import pack_header, payload_checksum
from epd_common.store.nixl import NixlOptions, NixlStore, open_nixl
from epd_common.store.redis_store import CHUNK_BYTES
from epd_common.store.room import write_whole

ROW_BYTES = 7168
"""3,584 values of bfloat16, a row of Qwen2.5-VL-7B."""

QUOTA_BYTES = 4 << 30
TTL_S = 600
LINKS = ("unix", "tcp")
READY_LOOKS, READY_LOOK_S = 100, 0.01

MEMCPY = "memcpy, into memory used before"
ARENA = {
    "new": "memcpy, into new memory",
    "publish": "arena: write, checksum, publish",
    "pin": "arena: pin, map, verify",
    "out": "arena: map, copy out",
}
VALKEY = {
    "put": "put",
    "bring": "bring into the arena, verified",
    "get": "get into new memory, verified",
    "read": "read into memory used before",
    "GET": "redis-py's GET, blocking",
    "aGET": "redis-py's GET, asyncio",
}
NIXL = {
    "ready": "NIXL: bring into the arena, verified",
    "new": "NIXL: the same where no file is ready",
}
WAYS = (
    MEMCPY,
    *ARENA.values(),
    *NIXL.values(),
    *(f"Valkey, {link}: {way}" for link in LINKS for way in VALKEY.values()),
)

NIXL_BYTES = 512 << 20
NIXL_TIMEOUT_S = 5.0

Place = tuple[str, Locator]
"""An embedding's key, and where it lies in the memory of the process that keeps it."""

Step = Callable[[], Awaitable[object] | object]
Way = tuple[Step, Step]


def serve(
    orders: Connection, together: Barrier, root: Path, worker: str, urls: Mapping[str, str]
) -> None:
    """A process's main function: takes (way, bytes, place), answers with begin and end, until told None."""
    uvloop.run(_serve(orders, together, root, worker, urls))


async def _serve(
    orders: Connection, together: Barrier, root: Path, worker: str, urls: Mapping[str, str]
) -> None:
    arena = Arena(root, quota_bytes=QUOTA_BYTES, worker=worker)
    arena.open()
    ways: dict[int, dict[str, Way]] = {}
    async with (
        open_redis(urls["unix"]) as unix,
        open_redis(urls["tcp"]) as tcp,
        _nixl(unix, arena, worker, NIXL_BYTES) as ready,
        _nixl(unix, arena, worker, 0) as new,
    ):
        clients = {"unix": unix, "tcp": tcp}
        while (order := orders.recv()) is not None:
            name, size, place = order
            if size not in ways:
                ways = {size: await _ways(arena, clients, urls, size)}
                ways[size] |= {
                    NIXL["ready"]: _nixl_way(arena, ready, place, size),
                    NIXL["new"]: _nixl_way(arena, new, place, 0),
                }
            prepare, act = ways[size][name]
            await _run(prepare)
            together.wait()
            began = time.monotonic()  # one clock for all processes of a machine
            await _run(act)
            orders.send((began, time.monotonic()))
    arena.close()


def keep(orders: Connection, root: Path, urls: Mapping[str, str]) -> None:
    """The main function of a process that keeps embeddings in its memory: takes bytes, answers with where one
    of so many lies, until told None."""
    uvloop.run(_keep(orders, root, urls))


async def _keep(orders: Connection, root: Path, urls: Mapping[str, str]) -> None:
    arena = Arena(root, quota_bytes=QUOTA_BYTES, worker="keeper")
    arena.open()
    async with open_redis(urls["unix"]) as redis, _nixl(redis, arena, "keeper", 0) as store:
        # In a thread, as the store renews its record meanwhile.
        while (size := await asyncio.to_thread(orders.recv)) is not None:
            given = _embedding(size)
            await store.put(given)
            orders.send((given.header.key, store.locator(given.header.key)))
    arena.close()


def _nixl(
    redis: Any, arena: Arena, worker: str, ready_bytes: int
) -> contextlib.AbstractAsyncContextManager[NixlStore]:
    options = NixlOptions(
        node=worker,
        region_bytes=NIXL_BYTES,
        ready_bytes=ready_bytes,
        timeout_s=NIXL_TIMEOUT_S,
        lease_s=2 * NIXL_TIMEOUT_S,
    )
    return open_nixl(redis, arena, options, worker=worker, counters=Counter())


def _nixl_way(arena: Arena, store: NixlStore, place: Place, ready_bytes: int) -> Way:
    key, locator = place

    async def cleared() -> None:
        await arena.delete(key)
        for _ in range(READY_LOOKS):  # none is ready before the first
            if store.landing.ready_bytes >= ready_bytes:
                break
            await asyncio.sleep(READY_LOOK_S)

    async def bring() -> None:
        _found(await store.bring(key, [locator], arena, lambda _: True))

    return cleared, bring


async def _run(step: Step) -> None:
    result = step()
    if isinstance(result, Awaitable):
        await result


async def _ways(
    arena: Arena, clients: Mapping[str, Any], urls: Mapping[str, str], size: int
) -> dict[str, Way]:
    given = _embedding(size)
    header, payload = given.header, given.payload
    key = header.key
    used = memoryview(bytearray(payload.nbytes))
    await arena.put(given)

    def copy(source: memoryview, target: memoryview) -> None:
        target[:] = source

    def publish() -> None:
        sealed = msgspec.structs.replace(header, checksum=payload_checksum(payload))
        staged = arena.staging / key
        write_whole(staged, pack_header(sealed), payload, key=key)
        arena.adopt(staged, sealed)

    def pin() -> None:
        held = _found(arena.hold(key))
        _found(map_embedding(held)).verify()
        arena.expose(key)

    def out() -> None:
        copy(_found(map_embedding(_found(arena.pin(key)))).payload, used)

    async def published() -> None:
        arena.unpin(key)
        await arena.put(given)

    ways: dict[str, Way] = {
        MEMCPY: (_nothing, lambda: copy(payload, used)),
        ARENA["new"]: (_nothing, lambda: bytearray(payload)),
        ARENA["publish"]: (lambda: arena.delete(key), publish),
        ARENA["pin"]: (published, pin),
        ARENA["out"]: (published, out),
    }
    for link in LINKS:
        found = await _valkey_ways(arena, clients[link], urls[link], given)
        ways |= {f"Valkey, {link}: {VALKEY[name]}": way for name, way in found.items()}
    return ways


async def _valkey_ways(arena: Arena, client: Any, url: str, given: Embedding) -> dict[str, Way]:
    key = given.header.key
    plain = f"plain:{key}"
    store = RedisEmbeddingStore(client, ttl_s=TTL_S)
    reader = BulkReader(client, most_bytes=CHUNK_BYTES)
    blocking = redis.Redis.from_url(url)
    await store.put(given)
    await client.set(plain, given.payload, ex=TTL_S)
    chunks = -(-given.payload.nbytes // CHUNK_BYTES)
    names = [f"epd:v1:emb:{key}:{number}" for number in range(chunks)]

    def all_of(values: Values) -> int:
        return sum(_found(value).nbytes for value in values)

    async def cleared() -> None:
        arena.unpin(key)
        await arena.delete(key)

    async def bring() -> None:
        _found(await store.bring(key, (), arena, lambda _: True))

    async def get() -> None:
        _found(await store.get(key))

    return {
        "put": (_nothing, lambda: store.put(given)),
        "bring": (cleared, bring),
        "get": (_nothing, get),
        "read": (_nothing, lambda: reader.read(names, ttl_s=TTL_S, take=all_of)),
        "GET": (_nothing, lambda: blocking.get(plain)),
        "aGET": (_nothing, lambda: client.get(plain)),
    }


def _embedding(size: int) -> Embedding:
    payload = memoryview(bytearray(os.urandom(1 << 20) * (size // (1 << 20) + 1)))
    rows = size // ROW_BYTES
    payload = payload[: rows * ROW_BYTES]
    header = EmbeddingHeader(
        key=secrets.token_hex(32),
        rows=rows,
        width=ROW_BYTES // 2,
        dtype="bfloat16",
        checksum=payload_checksum(payload),
    )
    return Embedding(header, payload)


def _nothing() -> None:
    """For what needs no preparation."""


def _found(value: Any) -> Any:
    if value is None:
        raise RuntimeError("what was put is not there")
    return value
