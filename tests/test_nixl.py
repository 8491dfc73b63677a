"""Embeddings in another process's memory: what comes over, and what happens when that one does not play."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import secrets
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from epd_common.engines import EngineInfo
from epd_common.protocol import Locator
from epd_common.settings import SettingsError, load_settings
from epd_common.store import (
    Arena,
    Embedding,
    EmbeddingHeader,
    RedisEmbeddingStore,
    StoreFullError,
    open_redis,
)
from epd_common.store.embedding import payload_checksum
from epd_common.store.nixl import NixlStore
from epd_common.store.nixl import agent as agent_module
from epd_common.store.nixl import reader as reader_module
from epd_common.store.nixl.agent import Agent
from epd_common.store.nixl.errors import NixlMissingError, NotReadError
from epd_common.store.nixl.memory import Span
from epd_common.store.nixl.peers import PREFIX, pack_peer, unpack_peer
from epd_encoder.settings import EncoderSettings
from epd_pd.pins import Pins
from nixl_peer import MB, PeerProcess, reading
from service_stack import eventually

pytestmark = pytest.mark.slow

WIDTH = 256
FINGERPRINT = "f" * 64


def embedding(size: int = MB) -> Embedding:
    payload = secrets.token_bytes(MB) * -(-size // MB)
    payload = payload[:size]
    header = EmbeddingHeader(
        key=secrets.token_hex(32),
        rows=size // (2 * WIDTH),
        width=WIDTH,
        dtype="bfloat16",
        fingerprint=FINGERPRINT,
        checksum=payload_checksum(payload),
    )
    return Embedding(header, memoryview(payload))


@pytest.fixture
def folder() -> Any:
    with tempfile.TemporaryDirectory(prefix="epd-test-", dir="/dev/shm") as made:
        yield Path(made)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with open_redis(redis_url) as client:
        yield client


class Rig:
    """One peer, and a reader in this process, with a PD worker's pins over it."""

    def __init__(
        self, redis: Redis, redis_url: str, peer: PeerProcess, nixl: NixlStore, arena: Arena
    ) -> None:
        self.redis = redis
        self.redis_url = redis_url
        self.peer = peer
        self.nixl = nixl
        self.arena = arena
        self.counters = nixl._counters
        self.valkey = RedisEmbeddingStore(redis, ttl_s=30)

    async def bring(self, key: str, *places: Locator) -> EmbeddingHeader | None:
        return await self.nixl.bring(key, places, self.arena, lambda _: True)

    def pins(self) -> Pins:
        info = EngineInfo(
            model="m",
            fingerprint=FINGERPRINT,
            width=WIDTH,
            dtype="bfloat16",
            modalities=("image",),
            max_model_len=4096,
            special_tokens=(),
        )
        return Pins(self.arena, [self.nixl, self.valkey], info=info, counters=self.counters)

    def failed(self) -> dict[str, int]:
        head = "nixl_failed_"
        return {name[len(head) :]: n for name, n in self.counters.items() if name.startswith(head)}

    async def has(self, given: Embedding) -> bool:
        found = await self.arena.get(given.header.key)
        return found is not None and bytes(found.payload) == bytes(given.payload)


@pytest.fixture
async def rig(redis: Redis, redis_url: str, folder: Path) -> AsyncIterator[Rig]:
    async with (
        PeerProcess(redis_url, folder / "theirs") as peer,
        reading(redis, folder / "ours", Counter(), timeout_s=0.8) as (nixl, arena),
    ):
        yield Rig(redis, redis_url, peer, nixl, arena)


@pytest.fixture
async def by_tcp(
    redis: Redis, redis_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Rig]:
    """The same over TCP alone, as between hosts: the peer's process has a part in each read."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    async with (
        PeerProcess(redis_url, folder / "theirs", region_bytes=256 * MB) as peer,
        reading(redis, folder / "ours", Counter(), timeout_s=0.8) as (nixl, arena),
    ):
        yield Rig(redis, redis_url, peer, nixl, arena)


@pytest.fixture(scope="module")
async def quiet_rig(redis_url: str) -> AsyncIterator[Rig]:
    """For what leaves the peer as it is; a lease ends there by a reader's word alone."""
    with tempfile.TemporaryDirectory(prefix="epd-test-", dir="/dev/shm") as made:
        async with (
            open_redis(redis_url) as redis,
            PeerProcess(redis_url, Path(made) / "theirs", lease_s=60.0) as peer,
            reading(redis, Path(made) / "ours", Counter()) as (nixl, arena),
        ):
            yield Rig(redis, redis_url, peer, nixl, arena)


def at_read(number: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[Span]:
    """Do something right before the given read of a peer's memory; what was read, in order."""
    read, seen = Agent.read, []

    def watched(self: Agent, peer: str, source: Span, target: Span, **rest: Any) -> None:
        seen.append(source)
        if len(seen) == number:
            act()
        read(self, peer, source, target, **rest)

    monkeypatch.setattr(Agent, "read", watched)
    return seen


# -- what comes over -----------------------------------------------------------------------------


async def test_it_lands_in_the_arena_and_the_slot_is_given_back(quiet_rig: Rig) -> None:
    rig = quiet_rig
    rig.counters.clear()
    given = embedding(9 * MB + 512)
    place = await rig.peer.put(given)
    assert place.store == "nixl" and place.node == "n" and place.bytes == given.header.file_bytes
    assert await rig.bring(given.header.key, place) == given.header
    assert await rig.has(given)
    await eventually(lambda: _free(rig.peer), "the reader says that it is done")
    assert list(rig.arena.staging.iterdir()) == []
    landing = rig.nixl.landing
    await eventually(lambda: landing.ready_bytes >= given.header.file_bytes, "a place made ready")
    files = {path.name for path in rig.arena.landing.iterdir()}
    other = embedding(9 * MB)
    assert await rig.bring(other.header.key, await rig.peer.put(other)) == other.header
    assert await rig.has(other)
    assert not files & {path.name for path in rig.arena.landing.iterdir()}, "it was used"


async def test_many_at_the_same_time(quiet_rig: Rig) -> None:
    rig = quiet_rig
    rig.counters.clear()
    given = [embedding(2 * MB) for _ in range(16)]
    places = [await rig.peer.put(each) for each in given]
    headers = await asyncio.gather(
        *(rig.bring(each.header.key, place) for each, place in zip(given, places, strict=True))
    )
    assert list(headers) == [each.header for each in given]
    assert all([await rig.has(each) for each in given])


async def test_what_this_process_keeps_itself_needs_no_peer(quiet_rig: Rig) -> None:
    rig = quiet_rig
    rig.counters.clear()
    given = embedding()
    await rig.nixl.put(given)
    place = rig.nixl.locator(given.header.key)
    assert place is not None
    assert await rig.bring(given.header.key, place) == given.header
    assert await rig.has(given)


async def test_what_is_of_no_use_is_not_brought(
    quiet_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = quiet_rig
    rig.counters.clear()
    given = embedding(9 * MB)
    place = await rig.peer.put(given)
    seen = at_read(0, lambda: None, monkeypatch)
    brought = await rig.nixl.bring(given.header.key, [place], rig.arena, lambda _: False)
    assert brought is None and rig.failed() == {}
    assert len(seen) == 1, "nothing but its header was read"
    assert not await rig.arena.contains(given.header.key)


async def test_an_idle_agent_takes_under_3_percent_of_a_core(rig: Rig) -> None:
    given = embedding()
    await rig.bring(given.header.key, await rig.peer.put(given))
    assert await rig.peer.ask("idle_cpu", 4.0) < 0.03


# -- a peer that dies, or hangs ------------------------------------------------------------------


async def take(rig: Rig, given: Embedding, place: Locator) -> tuple[float, str]:
    """Pin it as a PD worker does: the seconds that took, and from where it came."""
    pins = rig.pins()
    began = time.monotonic()
    header = await pins.take(given.header.key, locators=[place])
    took = time.monotonic() - began
    assert header == given.header
    source = pins.source(given.header.key)
    assert bytes((rig.arena.pins / header.key).read_bytes()[4096:]) == bytes(given.payload)
    pins.release(header.key)
    return took, source


async def test_a_dead_peer_costs_no_second_and_valkey_has_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, asked = Agent.connect, []

    def watched(self: Agent, peer: str, metadata: bytes) -> None:
        asked.append(peer)
        connect(self, peer, metadata)

    monkeypatch.setattr(Agent, "connect", watched)
    given, other = embedding(9 * MB), embedding(9 * MB)
    places = [await rig.peer.put(each) for each in (given, other)]
    for each in (given, other):
        await rig.valkey.put(each)
    rig.peer.kill()
    took, source = await take(rig, given, places[0])
    assert source == "redis" and took < 1
    took, source = await take(rig, other, places[1])
    assert source == "redis" and took < 1
    assert rig.failed() == {"gone": 2}
    assert asked == [places[0].agent]
    assert rig.counters["redis_fetched_bytes"] == 18 * MB


async def test_a_peer_that_died_after_it_was_read(rig: Rig) -> None:
    given, other = embedding(9 * MB), embedding(9 * MB)
    places = [await rig.peer.put(each) for each in (given, other)]
    assert (await take(rig, given, places[0]))[1] == "nixl"
    await rig.valkey.put(other)
    rig.peer.kill()
    took, source = await take(rig, other, places[1])
    assert source == "redis" and took < 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_mid_read_the_reader_recovers_in_a_second(
    by_tcp: Rig, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    given = embedding(112 * 10**6 // 512 * 512)
    place = await by_tcp.peer.put(given)
    await by_tcp.valkey.put(given)
    seen = at_read(8, lambda: by_tcp.peer.signal(number), monkeypatch)
    took, source = await take(by_tcp, given, place)
    assert len(seen) == 8, "it was in the midst of it"
    assert source == "redis"
    reason = {signal.SIGKILL: "gone", signal.SIGSTOP: "late"}[number]
    assert by_tcp.failed() == {reason: 1}
    # From Valkey alone it takes so long here; what the fault itself costs is the rest.
    await by_tcp.arena.delete(given.header.key)
    began = time.monotonic()
    assert await by_tcp.valkey.bring(given.header.key, (), by_tcp.arena, lambda _: True)
    assert took - (time.monotonic() - began) < 1
    assert not list(by_tcp.arena.staging.iterdir())


async def test_mid_read_over_shared_memory(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    given = embedding(50 * MB)
    place = await rig.peer.put(given)
    await rig.valkey.put(given)
    at_read(6, rig.peer.kill, monkeypatch)
    took, source = await take(rig, given, place)
    assert source == "redis" and took < 1
    assert rig.failed() == {"gone": 1}


async def test_what_comes_too_late_spoils_nothing(
    by_tcp: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer hangs in the midst of a read and goes on later: what it still sends lands nowhere."""
    monkeypatch.setattr(reader_module, "SUSPECT_S", 0.0)
    given, other = embedding(20 * MB), embedding(20 * MB)
    places = [await by_tcp.peer.put(each) for each in (given, other)]
    at_read(4, lambda: by_tcp.peer.signal(signal.SIGSTOP), monkeypatch)
    assert await by_tcp.bring(given.header.key, places[0]) is None
    assert by_tcp.failed() == {"late": 1}
    await eventually(lambda: len(by_tcp.nixl.landing._quarantine) == 1, "its memory is left alone")
    assert not by_tcp.nixl._agent._connected
    by_tcp.peer.signal(signal.SIGCONT)
    for each, place in zip((given, other), places, strict=True):
        assert await by_tcp.bring(each.header.key, place) == each.header
        assert await by_tcp.has(each)
    assert await by_tcp.peer.ask("contains", given.header.key)


# -- a locator that is wrong ---------------------------------------------------------------------

WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "behind the region": ("refused", {"offset": 64 * MB}),
    "over its end": ("refused", {"offset": 63 * MB}),
    "before it": ("refused", {"offset": -4096}),
    "far": ("refused", {"offset": 2**63}),
    "nothing": ("refused", {"bytes": 0}),
    "a header alone": ("refused", {"bytes": 4096}),
    "negative": ("refused", {"bytes": -1}),
    "too much": ("refused", {"bytes": 2**62}),
    "the whole region": ("stale", {"offset": 4096, "bytes": 64 * MB - 4096}),
    "another length": ("stale", {"bytes": MB}),
    "another place": ("stale", {"offset": 512}),
    "another version": ("incompatible", {"compat": "0" * 16}),
    "another process": ("unknown", {"agent": "nobody"}),
    "no name": ("unknown", {"agent": ""}),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_wrong_locator_is_refused(
    quiet_rig: Rig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    rig = quiet_rig
    reason, changes = WRONG[what]
    given = embedding(2 * MB)
    right = await rig.peer.put(given)
    wrong = msgspec.structs.replace(right, **changes)
    rig.counters.clear()
    seen = at_read(0, lambda: None, monkeypatch)
    assert await rig.bring(given.header.key, wrong) is None
    assert rig.failed() == {reason: 1}
    assert len(seen) == (reason == "stale"), "at most its header was read"
    assert await rig.bring(given.header.key, wrong, right) == given.header, (
        "the next place is tried"
    )
    await rig.peer.ask("delete", given.header.key)


async def test_another_key_than_what_lies_there(quiet_rig: Rig) -> None:
    rig = quiet_rig
    given = embedding(2 * MB)
    place = await rig.peer.put(given)
    rig.counters.clear()
    assert await rig.bring("0" * 64, place) is None
    assert rig.failed() == {"stale": 1}
    assert not await rig.arena.contains("0" * 64)


async def test_a_generation_that_is_none_changes_nothing(quiet_rig: Rig) -> None:
    rig = quiet_rig
    given = embedding(2 * MB)
    place = await rig.peer.put(given)
    wrong = msgspec.structs.replace(place, generation=2**63 - 1)
    assert await rig.bring(given.header.key, wrong) == given.header
    await eventually(lambda: _free(rig.peer), "nothing is leased")


@pytest.mark.parametrize("cut", [0, 4, 9, 100, 400, -1])
async def test_a_damaged_record_of_a_peer_is_refused(quiet_rig: Rig, cut: int) -> None:
    """NIXL crashes on some damaged metadata, so it must never see them."""
    rig = quiet_rig
    given = embedding(MB)
    place = await rig.peer.put(given)
    true = await rig.redis.get(PREFIX + place.agent)
    assert isinstance(true, bytes)
    forged = f"forged-{cut}"
    await rig.redis.set(PREFIX + forged, true[:cut], ex=30)
    rig.counters.clear()
    wrong = msgspec.structs.replace(place, agent=forged)
    assert await rig.bring(given.header.key, wrong) is None
    assert rig.failed() == {"refused": 1}


async def test_a_record_with_one_wrong_bit_is_refused(quiet_rig: Rig) -> None:
    rig = quiet_rig
    given = embedding(MB)
    place = await rig.peer.put(given)
    record = bytearray(await rig.redis.get(PREFIX + place.agent))  # type: ignore[arg-type]
    wrong = msgspec.structs.replace(place, agent="wrong-bit")
    at = record.index(b"MemSection")
    record[at + 60] ^= 1
    assert await rig.redis.set(PREFIX + wrong.agent, bytes(record), ex=30)
    rig.counters.clear()
    with pytest.raises(NotReadError, match="damaged"):
        unpack_peer(bytes(record))
    assert await rig.bring(given.header.key, wrong) is None
    assert rig.failed() == {"refused": 1}


async def test_a_record_that_names_another_process_is_refused(quiet_rig: Rig) -> None:
    rig = quiet_rig
    given = embedding(MB)
    place = await rig.peer.put(given)
    true = unpack_peer(await rig.redis.get(PREFIX + place.agent))  # type: ignore[arg-type]
    await rig.redis.set(PREFIX + "other", pack_peer(true), ex=30)
    rig.counters.clear()
    wrong = msgspec.structs.replace(place, agent="other")
    assert await rig.bring(given.header.key, wrong) is None
    assert rig.failed() == {"refused": 1}


async def test_another_version_is_said_once(
    quiet_rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = quiet_rig
    given = embedding(MB)
    place = msgspec.structs.replace(await rig.peer.put(given), compat="other")
    rig.nixl._said.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert await rig.bring(given.header.key, place) is None
    said = [record for record in caplog.records if "another version" in record.getMessage()]
    assert len(said) == 1


# -- leases --------------------------------------------------------------------------------------


async def test_what_is_read_is_not_evicted_and_what_is_deleted_waits(
    redis: Redis, redis_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert go.wait(10)

    async with (
        PeerProcess(redis_url, folder / "theirs", region_bytes=24 * MB, lease_s=8.0) as peer,
        reading(redis, folder / "ours", Counter(), timeout_s=6.0) as (nixl, arena),
    ):
        rig = Rig(redis, redis_url, peer, nixl, arena)
        given = embedding(9 * MB)
        place = await peer.put(given)
        at_read(3, hold, monkeypatch)
        bringing = asyncio.create_task(rig.bring(given.header.key, place))
        await asyncio.to_thread(entered.wait, 10)
        await eventually(lambda: _leased(peer), "a lease")
        for _ in range(4):
            await peer.put(embedding(9 * MB))
        assert await peer.ask("locator", given.header.key) is not None, "others had to go"
        with pytest.raises(StoreFullError, match="is more than EPD_NIXL_BYTES"):
            await peer.put(embedding(25 * MB))
        await peer.ask("delete", given.header.key)
        assert (await peer.ask("report"))["quarantined"] == 1
        last = embedding(13 * MB)
        assert await peer.put(last), "where it does not lie"
        go.set()
        assert await bringing == given.header
        assert await rig.has(given), "it was whole to the end"
        await eventually(lambda: _free(peer), "the end of the quarantine")


async def _leased(peer: PeerProcess) -> bool:
    return bool((await peer.ask("report"))["leased"])


async def _free(peer: PeerProcess) -> bool:
    report = await peer.ask("report")
    return not report["leased"] and not report["quarantined"]


async def test_evicted_is_stale_and_can_be_put_again(
    redis: Redis, redis_url: str, folder: Path
) -> None:
    async with (
        PeerProcess(redis_url, folder / "theirs", region_bytes=10 * MB) as peer,
        reading(redis, folder / "ours", Counter()) as (nixl, arena),
    ):
        rig = Rig(redis, redis_url, peer, nixl, arena)
        given, other = embedding(9 * MB), embedding(9 * MB)
        place = await peer.put(given)
        await peer.put(other)
        assert not await peer.ask("contains", given.header.key)
        assert await rig.bring(given.header.key, place) is None
        assert rig.failed() == {"stale": 1}
        again = await peer.put(given)
        assert again.generation != place.generation
        assert await rig.bring(given.header.key, again) == given.header


async def test_deleted_is_not_read_by_who_knows_where_it_was(quiet_rig: Rig) -> None:
    rig = quiet_rig
    given = embedding()
    place = await rig.peer.put(given)
    await rig.peer.ask("delete", given.header.key)
    rig.counters.clear()
    assert await rig.bring(given.header.key, place) is None
    assert rig.failed() == {"stale": 1}


async def test_where_all_is_being_read_an_encode_waits_for_a_while(
    redis: Redis, folder: Path
) -> None:
    options = {"region_bytes": 2 * MB, "timeout_s": 0.2, "lease_s": 0.5}
    async with reading(redis, folder, Counter(), **options) as (nixl, _):
        first, second = embedding(), embedding()
        await nixl.put(first)
        slot = nixl.slots.find(first.header.key)
        assert slot is not None

        async def read_on() -> None:
            while True:
                nixl.slots.lease(slot.generation, "reader")
                await asyncio.sleep(0.05)

        reader = asyncio.create_task(read_on())
        await asyncio.sleep(0)
        with pytest.raises(StoreFullError, match="is being read"):
            await nixl.put(second)
        reader.cancel()
        await nixl.put(second)
        assert await nixl.contains(second.header.key)
        assert not await nixl.contains(first.header.key)


async def test_damaged_in_the_peer_is_found_by_both_sides(quiet_rig: Rig) -> None:
    rig = quiet_rig
    rig.counters.clear()
    given = embedding(9 * MB)
    place = await rig.peer.put(given)
    await rig.peer.ask("damage", given.header.key)
    assert await rig.bring(given.header.key, place) is None
    assert rig.failed() == {"stale": 1}
    assert not await rig.arena.contains(given.header.key)
    assert not await rig.peer.ask("contains", given.header.key), (
        "so it is put again, not told again"
    )
    assert await rig.bring(given.header.key, await rig.peer.put(given)) == given.header


async def test_a_process_that_leaves_takes_its_record_and_its_files_along(
    redis: Redis, redis_url: str, folder: Path
) -> None:
    async with reading(redis, folder / "ours", Counter()) as (nixl, arena):
        await nixl.put(embedding())
        name = PREFIX + nixl._agent.name
        assert await redis.exists(name)
    assert not await redis.exists(name)
    assert not arena.landing.exists()


def test_what_a_dead_worker_was_reading_is_swept(folder: Path) -> None:
    dead, other = (Arena(folder, quota_bytes=MB, worker=name) for name in ("dead", "other"))
    dead.open()
    dead.landing.mkdir(parents=True)
    (dead.landing / "1").write_bytes(b"x")
    assert dead._ownership is not None
    os.close(dead._ownership)  # its lock goes with a process
    other.open()
    assert not dead.landing.exists()
    other.close()


# -- setting it up -------------------------------------------------------------------------------


async def test_without_the_package_a_worker_says_what_to_install(
    redis: Redis, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(agent_module.importlib.metadata, "version", missing)
    with pytest.raises(NixlMissingError, match=r"pip install 'epdflow\[nixl\]'"):
        async with reading(redis, folder, Counter()):
            pass


def test_a_lease_must_outlast_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_MODEL", "m")
    monkeypatch.setenv("EPD_STORES", "arena,nixl,redis")
    assert load_settings(EncoderSettings).nixl_options().lease_s == 5.0
    monkeypatch.setenv("EPD_NIXL_TIMEOUT_S", "6")
    with pytest.raises(SettingsError, match="EPD_NIXL_LEASE_S=5 must be more than"):
        load_settings(EncoderSettings)
    monkeypatch.setenv("EPD_STORES", "nixls")
    with pytest.raises(SettingsError, match="list of arena, nixl, redis"):
        load_settings(EncoderSettings)
