"""A process that keeps embeddings in its registered memory, as an encoder does, and does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from epd_common.protocol import Locator
from epd_common.store import Arena, Embedding, EmbeddingHeader, open_redis
from epd_common.store.embedding import HEADER_BYTES
from epd_common.store.nixl import NixlOptions, NixlStore, open_nixl

MB = 1 << 20
ANSWER_S = 30.0


def options(**changes: Any) -> NixlOptions:
    """With time enough for a machine that has other work, where it is not the time that is tested."""
    given = {
        "node": "n",
        "region_bytes": 64 * MB,
        "ready_bytes": 32 * MB,
        "timeout_s": 5.0,
        "lease_s": 10.0,
    }
    return NixlOptions(**given | changes)


@contextlib.asynccontextmanager
async def reading(
    redis: Any, root: Path, counters: Counter[str], **changes: Any
) -> AsyncIterator[tuple[NixlStore, Arena]]:
    """A store of this process and the arena that it brings to."""
    arena = Arena(root, quota_bytes=512 * MB, worker="reader")
    arena.open()
    async with open_nixl(
        redis, arena, options(**changes), worker="reader", counters=counters
    ) as store:
        yield store, arena
    arena.close()


class Told:
    """What the process can be told, by name."""

    def __init__(self, store: NixlStore) -> None:
        self._store = store

    async def put(self, header: EmbeddingHeader, payload: bytes) -> Locator | None:
        await self._store.put(Embedding(header, memoryview(payload)))
        return self._store.locator(header.key)

    async def locator(self, key: str) -> Locator | None:
        return self._store.locator(key)

    async def contains(self, key: str) -> bool:
        return await self._store.contains(key)

    async def delete(self, key: str) -> None:
        await self._store.delete(key)

    async def used_bytes(self) -> int:
        return await self._store.used_bytes()

    async def damage(self, key: str) -> None:
        slot = self._store.slots.find(key)
        assert slot is not None and self._store._region is not None
        self._store._region.write(slot.offset + HEADER_BYTES + 100, b"\xaa\x55\xaa\x55")

    async def report(self) -> dict[str, int]:
        await self._store._hear()
        return self._store.report()

    async def idle_cpu(self, seconds: float) -> float:
        """Share of a core that the process takes while it does nothing."""
        before = os.times()
        await asyncio.sleep(seconds)
        after = os.times()
        return (after.user + after.system - before.user - before.system) / seconds


class PeerProcess:
    """The process, from outside."""

    def __init__(self, redis_url: str, root: Path, **changes: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_main, args=(theirs, redis_url, root, changes), daemon=True
        )
        self.process.start()
        theirs.close()
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self.ask("used_bytes")
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.end)

    async def ask(self, name: str, *args: Any) -> Any:
        async with self._turn:
            self._pipe.send((name, args))
            return await asyncio.to_thread(self._answer)

    def _answer(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError("the peer does not answer")
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def put(self, given: Embedding) -> Locator:
        return await self.ask("put", given.header, bytes(given.payload))  # type: ignore[no-any-return]

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
            self.signal(signal.SIGCONT)
        self.process.join(5)
        self.process.kill()
        self.process.join()


def _main(orders: Connection, redis_url: str, root: Path, changes: dict[str, Any]) -> None:
    asyncio.run(_serve(orders, redis_url, root, changes))


async def _serve(orders: Connection, redis_url: str, root: Path, changes: dict[str, Any]) -> None:
    arena = Arena(root, quota_bytes=512 * MB, worker="peer")
    arena.open()
    async with (
        open_redis(redis_url) as redis,
        open_nixl(redis, arena, options(**changes), worker="peer", counters=Counter()) as store,
    ):
        told = Told(store)
        while (order := await asyncio.to_thread(_next, orders)) is not None:
            name, args = order
            try:
                orders.send(await getattr(told, name)(*args))
            except Exception as error:  # the test's to judge
                orders.send(error)
    arena.close()


def _next(orders: Connection) -> Any:
    try:
        return orders.recv()
    except (EOFError, OSError):
        return None


class Distant:
    """A peer's embeddings as a store, read by NIXL each time."""

    name = "nixl"

    def __init__(self, peer: PeerProcess, store: NixlStore, arena: Arena) -> None:
        self._peer = peer
        self._store = store
        self._arena = arena
        self._turn = asyncio.Lock()

    async def put(self, embedding: Embedding) -> None:
        await self._peer.put(embedding)

    async def get(self, key: str) -> Embedding | None:
        locator = await self._peer.ask("locator", key)
        places = [locator] if locator is not None else []
        async with self._turn:
            if await self._store.bring(key, places, self._arena, lambda _: True) is None:
                return None
            found = await self._arena.get(key)
            await self._arena.delete(key)
            return found

    async def contains(self, key: str) -> bool:
        return await self._peer.ask("contains", key)  # type: ignore[no-any-return]

    async def delete(self, key: str) -> None:
        await self._peer.ask("delete", key)

    async def used_bytes(self) -> int:
        return await self._peer.ask("used_bytes")  # type: ignore[no-any-return]

    async def damage(self, key: str) -> None:
        await self._peer.ask("damage", key)
