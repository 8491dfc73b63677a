"""Embeddings in this process's registered memory, and reading those of others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from redis.asyncio import Redis

from epd_common.errors import EpdError, UnavailableError
from epd_common.protocol import Locator
from epd_common.seldom import Seldom
from epd_common.store.arena import Arena
from epd_common.store.base import StoreFullError
from epd_common.store.embedding import (
    HEADER_BYTES,
    Embedding,
    EmbeddingHeader,
    IntegrityError,
    pack_header,
    unpack_header,
)
from epd_common.store.nixl.agent import Agent, compatibility
from epd_common.store.nixl.errors import NotReadError, Reason
from epd_common.store.nixl.landing import Landing
from epd_common.store.nixl.memory import HostRegion, Region
from epd_common.store.nixl.peers import EVERY_S, Peer, Peers
from epd_common.store.nixl.reader import LEASE, RELEASE, Reader
from epd_common.store.nixl.slots import Slot, Slots
from epd_common.tasks import end, whole

logger = logging.getLogger(__name__)

THREADS = 8
HEAR_S = 1.0
LOOK_FOR_ROOM_S = 0.01
GRACE_S = 0.1
"""What is not NIXL's own wait: a thread's turn, a look into Valkey, the arena's rename."""

MOST_KNOWN = 1024
SAY_S: dict[Reason, float] = {"incompatible": 3600.0}
"""Seconds between two log lines of one reason; of all others 10."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlOptions:
    """Sizes and times; see the settings of the same names.

    Attributes:
        node: Of this process, named in its locators.
    """

    node: str
    region_bytes: int
    ready_bytes: int
    timeout_s: float
    lease_s: float
    make_region: Callable[[int], Region] = HostRegion


class NixlStore:
    """Made by :func:`open_nixl`.

    Args:
        counters: ``nixl_written``, ``nixl_written_bytes``, and ``nixl_failed_<reason>``: reads that were not.
    """

    name = "nixl"

    def __init__(
        self,
        agent: Agent,
        landing: Landing,
        peers: Peers,
        options: NixlOptions,
        counters: Counter[str],
    ) -> None:
        self._agent = agent
        self._peers = peers
        self._options = options
        self._counters = counters
        self._compat = compatibility()
        self._region: Region | None = None
        self._own: Peer | None = None
        self.slots = Slots(options.region_bytes, lease_s=options.lease_s, counters=counters)
        self.landing = landing
        self._reader = Reader(agent, landing, compat=self._compat, timeout_s=options.timeout_s)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="nixl")
        self._known: dict[str, Peer] = {}
        self._opening = asyncio.Lock()
        self._said: dict[Reason, Seldom] = {}
        self._readers = itertools.count(1)
        self._announced = -EVERY_S

    # -- what this process keeps -----------------------------------------------------------------

    async def put(self, embedding: Embedding) -> None:
        header = embedding.header
        region = await self._open_region()
        if self.slots.find(header.key) is not None:
            return
        slot = await self._room(header)
        try:
            await whole(self._run(_write, region, slot, embedding))
        except BaseException:
            self.slots.drop(slot)
            raise
        self.slots.publish(slot)
        self._counters["nixl_written"] += 1
        self._counters["nixl_written_bytes"] += header.payload_bytes

    async def get(self, key: str) -> Embedding | None:
        """Of what this process keeps itself, a copy."""
        slot, region = self.slots.find(key), self._region
        if slot is None or region is None:
            return None
        reader = f"{self._agent.name} {next(self._readers)}"
        self.slots.lease(slot.generation, reader)
        try:
            return await whole(self._run(_read, region, slot))
        except IntegrityError as error:
            logger.warning("dropping a damaged embedding: %s", error, extra={"key": key})
            await self.delete(key)
            return None
        finally:
            self.slots.release(slot.generation, reader)

    async def contains(self, key: str) -> bool:
        """Whether this process keeps it, whole: one that others missed must not be told of again as it is."""
        return self.slots.find(key) is not None and await self.get(key) is not None

    async def delete(self, key: str) -> None:
        slot = self.slots.forget(key)
        if slot is not None and self._region is not None:
            # Whoever comes with an old locator sees at once that nothing is there.
            self._region.write(slot.offset, bytes(HEADER_BYTES))

    async def used_bytes(self) -> int:
        return self.slots.used_bytes

    def locator(self, key: str) -> Locator | None:
        """Where others can read it; None: it is not kept (any more)."""
        slot = self.slots.find(key)
        if slot is None:
            return None
        return Locator(
            store=self.name,
            node=self._options.node,
            agent=self._agent.name,
            offset=slot.offset,
            bytes=slot.size,
            generation=slot.generation,
            compat=self._compat,
        )

    async def _open_region(self) -> Region:
        """The region, made when it is first used: who only reads has none."""
        async with self._opening:
            if self._region is None:
                region = await self._run(self._options.make_region, self._options.region_bytes)
                span = region.span
                try:
                    await self._run(self._agent.register, span)
                except NotReadError as error:
                    region.close()
                    raise StoreFullError(error.message) from error
                self._own = Peer(
                    agent=self._agent.name,
                    metadata=await self._run(self._agent.metadata, span),
                    address=span.address,
                    size=span.size,
                    kind=span.kind,
                    device=span.device,
                    compat=self._compat,
                )
                self._region = region
            if time.monotonic() - self._announced >= HEAR_S:
                await self._announce()
            return self._region

    async def _announce(self) -> None:
        if self._own is not None:
            await self._peers.announce(self._own)
            self._announced = time.monotonic()

    async def _room(self, header: EmbeddingHeader) -> Slot:
        """A slot; where all are being read it waits until a lease ends.

        Raises:
            StoreFullError: none is free in time, or ever.
        """
        if header.file_bytes > self._options.region_bytes:
            raise StoreFullError(
                f"an embedding of {header.file_bytes} bytes is more than EPD_NIXL_BYTES "
                f"({self._options.region_bytes})",
                key=header.key,
            )
        until = time.monotonic() + 2 * self._options.lease_s
        while True:
            await self._hear()
            slot = self.slots.take(header.key, header.file_bytes)
            if slot is not None:
                return slot
            if time.monotonic() > until:
                raise StoreFullError(
                    f"all of EPD_NIXL_BYTES ({self._options.region_bytes}) is being read",
                    key=header.key,
                )
            await asyncio.sleep(LOOK_FOR_ROOM_S)

    async def _hear(self) -> None:
        """Take what readers have said."""
        for reader, text in await self._run(self._agent.notices):
            word, _, number = text.partition(b" ")
            if not number.isdigit() or len(number) > 18:
                continue
            if word == LEASE.encode():
                self.slots.lease(int(number), reader)
            elif word == RELEASE.encode():
                self.slots.release(int(number), reader)

    async def keep(self) -> None:
        """Renew this process's record, and hear readers, for ever."""
        while True:
            await asyncio.sleep(HEAR_S)
            await self._hear()
            if time.monotonic() - self._announced >= EVERY_S:
                try:
                    await self._announce()
                except EpdError as error:
                    logger.warning("other nodes may not find this one's embeddings: %s", error)

    # -- what others keep ------------------------------------------------------------------------

    async def bring(
        self,
        key: str,
        locators: Sequence[Locator],
        arena: Arena,
        fits: Callable[[EmbeddingHeader], bool],
    ) -> EmbeddingHeader | None:
        for locator in locators:
            if locator.store != self.name:
                continue
            try:
                return await self._bring(key, locator, arena, fits)
            except NotReadError as error:
                self._counters[f"nixl_failed_{error.reason}"] += 1
                if error.reason == "gone":
                    self._known.pop(locator.agent, None)
                every_s = SAY_S.get(error.reason, 10.0)
                if self._said.setdefault(error.reason, Seldom(every_s=every_s)).now():
                    logger.warning("not read by NIXL: %s", error, extra={"key": key})
        return None

    async def _bring(
        self,
        key: str,
        locator: Locator,
        arena: Arena,
        fits: Callable[[EmbeddingHeader], bool],
    ) -> EmbeddingHeader | None:
        if locator.agent == self._agent.name:
            kept = await self.get(key)
            if kept is None:
                raise NotReadError("stale", f"{key} is not kept here any more")
            if not fits(kept.header):
                return None
            await arena.put(kept)
            return kept.header
        self._reader.refuse_suspect(locator.agent)
        try:
            async with asyncio.timeout(self._options.timeout_s + GRACE_S):
                peer = await self._peer(locator.agent)
                return await self._run(self._reader.read, key, locator, peer, fits)
        except TimeoutError:
            raise NotReadError("late", f"peer {locator.agent} was not read in time") from None

    async def _peer(self, agent: str) -> Peer:
        peer = self._known.get(agent)
        if peer is None:
            try:
                peer = await self._peers.find(agent)
            except UnavailableError as error:
                raise NotReadError(
                    "unknown", f"peer {agent} cannot be looked up: {error}"
                ) from error
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[agent] = peer
        return peer

    # -- both ------------------------------------------------------------------------------------

    async def _run(self, step: Callable[..., T], *args: object) -> T:
        """In a thread of the store's own: a peer that hangs must not take those of others."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, step, *args)

    async def aclose(self) -> None:
        """Leave, and give all memory back."""
        if self._own is not None:
            with contextlib.suppress(EpdError):
                await self._peers.leave(self._agent.name)
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self.landing.close()
        if self._region is not None:
            self._agent.deregister(self._region.span)
        self._agent.close()
        if self._region is not None:
            self._region.close()

    def report(self) -> dict[str, int]:
        """What is kept, and who reads it."""
        return {
            "bytes": self.slots.used_bytes,
            "region_bytes": self._options.region_bytes,
            "leased": self.slots.leased,
            "quarantined": self.slots.quarantined,
            "ready_bytes": self.landing.ready_bytes,
        }


@contextlib.asynccontextmanager
async def open_nixl(
    redis: Redis, arena: Arena, options: NixlOptions, *, worker: str, counters: Counter[str]
) -> AsyncIterator[NixlStore]:
    """The store of this process, with the one agent that it has.

    Raises:
        NixlMissingError: NIXL cannot be used here.
    """
    agent = await asyncio.to_thread(Agent, f"{worker}-{secrets.token_hex(6)}")
    landing = Landing(arena, agent, ready_bytes=options.ready_bytes)
    store = NixlStore(agent, landing, Peers(redis), options, counters)
    keeping = asyncio.create_task(store.keep(), name="nixl")
    try:
        yield store
    finally:
        await end(keeping)
        await store.aclose()


def _write(region: Region, slot: Slot, embedding: Embedding) -> None:
    region.write(slot.offset + HEADER_BYTES, embedding.payload)
    region.write(slot.offset, pack_header(embedding.header))


def _read(region: Region, slot: Slot) -> Embedding:
    copy = region.read(slot.offset, slot.size)
    embedding = Embedding(unpack_header(copy), copy[HEADER_BYTES:])
    embedding.verify()
    return embedding
