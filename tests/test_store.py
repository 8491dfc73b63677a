"""Embedding stores: one suite that all of them pass, and what each does besides."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from epd_cli.brokers import embedded_brokers
from epd_common.errors import UnavailableError
from epd_common.store import (
    Arena,
    ArenaFullError,
    Embedding,
    EmbeddingHeader,
    EmbeddingStore,
    IntegrityError,
    MediaStore,
    RedisEmbeddingStore,
    StoreFullError,
    open_redis,
)
from epd_common.store import arena as arena_module
from epd_common.store.arena import ArenaInUseError, map_embedding, sweeping
from epd_common.store.embedding import (
    HEADER_BYTES,
    pack_header,
    payload_checksum,
    unpack_header,
)
from epd_common.store.redis_client import MAX_CONNECTIONS
from epd_common.store.redis_store import CHUNK_BYTES
from nixl_peer import Distant, PeerProcess, reading
from service_stack import eventually

WIDTH = 256
ROW_BYTES = 2 * WIDTH
KB, MB = 1024, 1024 * 1024
QUOTA = 64 * MB
SHM = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")
TTL_S = 30


def embedding(size: int = KB, key: str = "", **changes: Any) -> Embedding:
    """A random one with ``size`` payload bytes."""
    payload = secrets.token_bytes(size)
    header = EmbeddingHeader(
        key=key or secrets.token_hex(32),
        rows=size // ROW_BYTES,
        width=WIDTH,
        dtype="bfloat16",
        fingerprint="f" * 64,
        metadata={"image_grid_thw": [1, 8, 8]},
        checksum=payload_checksum(payload),
        **changes,
    )
    return Embedding(header, memoryview(payload))


def same(found: Embedding | None, expected: Embedding) -> bool:
    return (
        found is not None
        and found.header == expected.header
        and bytes(found.payload) == bytes(expected.payload)
    )


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with open_redis(redis_url) as client:
        yield client


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder on tmpfs, as in production: hard links and times behave as there."""
    folder = SHM / f"epd-test-{secrets.token_hex(6)}"
    folder.mkdir()
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.fixture
def arena(root: Path) -> Iterator[Arena]:
    made = Arena(root, quota_bytes=QUOTA, worker="w1")
    made.open()
    yield made
    made.close()


# -- the suite -----------------------------------------------------------------------------------

Damage = Callable[[str], Any]


@pytest.fixture(scope="module")
async def distant(redis_url: str) -> AsyncIterator[Distant]:
    """What another process keeps in its memory."""
    with tempfile.TemporaryDirectory(prefix="epd-test-", dir=SHM) as folder:
        ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
        async with (
            open_redis(redis_url) as redis,
            PeerProcess(redis_url, theirs) as peer,
            reading(redis, ours, Counter()) as (nixl, arena),
        ):
            yield Distant(peer, nixl, arena)


@pytest.fixture(params=["arena", "redis", "nixl"])
async def store(
    request: pytest.FixtureRequest, redis: Redis, arena: Arena, distant: Distant
) -> EmbeddingStore:
    made: dict[str, EmbeddingStore] = {
        "arena": arena,
        "redis": RedisEmbeddingStore(redis, ttl_s=TTL_S),
        "nixl": distant,
    }
    return made[request.param]


@pytest.fixture
def damage(store: EmbeddingStore, redis: Redis, root: Path) -> Damage:
    """Changes some bytes of a stored payload, behind the store's back."""

    async def in_redis(key: str) -> None:
        await redis.setrange(f"epd:v1:emb:{key}:0", 100, b"\xaa\x55\xaa\x55")

    async def in_arena(key: str) -> None:
        path = root / "data" / key
        data = bytearray(path.read_bytes())
        data[HEADER_BYTES + 100] ^= 0x55
        path.write_bytes(data)

    if isinstance(store, Distant):
        return store.damage
    return in_redis if store.name == "redis" else in_arena


@pytest.mark.parametrize("size", [KB, MB, 9 * MB], ids=["1KB", "1MB", "9MB"])
async def test_get_gives_what_was_put(store: EmbeddingStore, size: int) -> None:
    given = embedding(size)
    assert size <= CHUNK_BYTES or size > 2 * CHUNK_BYTES, "the large one takes several chunks"
    await store.put(given)
    found = await store.get(given.header.key)
    assert same(found, given)
    found.verify()  # type: ignore[union-attr]
    await store.delete(given.header.key)


async def test_missing_is_none(store: EmbeddingStore) -> None:
    key = secrets.token_hex(32)
    assert await store.get(key) is None
    assert not await store.contains(key)
    await store.delete(key)


async def test_damaged_is_none_and_gone(store: EmbeddingStore, damage: Damage) -> None:
    given = embedding(MB)
    await store.put(given)
    await damage(given.header.key)
    assert await store.get(given.header.key) is None
    assert not await store.contains(given.header.key)
    await store.put(given)
    assert same(await store.get(given.header.key), given), "it can be put again"


async def test_putting_twice_is_harmless(store: EmbeddingStore) -> None:
    given = embedding(MB)
    await store.put(given)
    first = await store.get(given.header.key)
    used = await store.used_bytes()
    await store.put(given)
    assert same(await store.get(given.header.key), given)
    assert same(first, given), "what a reader holds stays whole"
    assert await store.used_bytes() == used


async def test_delete(store: EmbeddingStore) -> None:
    given, other = embedding(), embedding()
    await store.put(given)
    await store.put(other)
    await store.delete(given.header.key)
    assert await store.get(given.header.key) is None
    assert not await store.contains(given.header.key)
    assert same(await store.get(other.header.key), other)


async def test_used_bytes_counts_header_and_payload(store: EmbeddingStore) -> None:
    before = await store.used_bytes()
    sizes = [KB, MB, 9 * MB]
    given = [embedding(size) for size in sizes]
    for each in given:
        await store.put(each)
    expected = sum(sizes) + len(sizes) * HEADER_BYTES
    assert await store.used_bytes() - before == expected
    assert expected == sum(each.header.file_bytes for each in given)


async def test_many_at_the_same_time(store: EmbeddingStore) -> None:
    """Writers of equal and of different keys, and readers, who see all of one or nothing."""
    given = [embedding(64 * KB) for _ in range(8)]
    done = asyncio.Event()

    async def read(expected: Embedding) -> int:
        found = 0
        while not done.is_set() or not found:
            got = await store.get(expected.header.key)
            assert got is None or same(got, expected)
            found += got is not None
            await asyncio.sleep(0)
        return found

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        readers = [group.create_task(read(each)) for each in given]
        async with asyncio.TaskGroup() as writers:
            for _ in range(4):
                for each in given:
                    writers.create_task(store.put(each))
        done.set()
    assert all(reader.result() for reader in readers)


# -- one embedding -------------------------------------------------------------------------------


def test_header_round_trip() -> None:
    header = embedding(KB).header
    assert len(pack_header(header)) == HEADER_BYTES
    assert unpack_header(pack_header(header)) == header


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 0},
        {"rows": -1},
        {"width": 0},
        {"dtype": "int8"},
    ],
    ids=str,
)
def test_a_header_that_cannot_be_true_is_refused(change: dict[str, Any]) -> None:
    fields = {"key": "k", "rows": 1, "width": 1, "dtype": "float16"} | change
    with pytest.raises(IntegrityError, match="cannot have"):
        unpack_header(pack_header(EmbeddingHeader(**fields)))


def test_foreign_bytes_are_no_header() -> None:
    good = pack_header(embedding(KB).header)
    too_long = good[:6] + b"\xff\xff" + good[8:]
    for bad in (b"", good[:-1], b"\x00" * HEADER_BYTES, b"X" + good[1:], too_long):
        with pytest.raises(IntegrityError):
            unpack_header(bad)
    with pytest.raises(IntegrityError, match="does not match its checksum"):
        unpack_header(good[:40] + bytes([good[40] ^ 1]) + good[41:])


def test_metadata_too_large_for_a_header() -> None:
    header = EmbeddingHeader(
        key="k", rows=1, width=1, dtype="float16", metadata={"x": "y" * HEADER_BYTES}
    )
    with pytest.raises(IntegrityError, match="metadata"):
        pack_header(header)


def test_verify_names_what_differs() -> None:
    given = embedding(KB)
    with pytest.raises(IntegrityError, match="512 payload bytes, its header says 1024"):
        Embedding(given.header, given.payload[:512]).verify()
    with pytest.raises(IntegrityError, match="checksum") as caught:
        Embedding(given.header, memoryview(bytes(KB))).verify()
    assert caught.value.key == given.header.key


# -- the arena -----------------------------------------------------------------------------------


def stage(arena: Arena, given: Embedding, name: str = "staged") -> Path:
    path = arena.staging / name
    path.write_bytes(bytes(HEADER_BYTES) + given.payload)
    return path


def age(root: Path, *keys: str) -> None:
    """Make these the least recently used ones, the first most of all."""
    for order, key in enumerate(keys):
        os.utime(root / "data" / key, ns=(order, order))


def stored(root: Path) -> set[str]:
    return set(os.listdir(root / "data"))


async def test_fc01_a_file_appears_whole(
    arena: Arena, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the moment of the rename the file is whole, and before it nobody sees a part."""
    given = embedding(MB)
    seen: list[tuple[set[str], bool]] = []
    rename = os.rename

    def watched(source: Path, target: Path) -> None:
        before = stored(root)
        whole = map_embedding(Path(source))
        rename(source, target)
        seen.append((before, same(whole, given)))

    monkeypatch.setattr(os, "rename", watched)
    await arena.put(given)
    assert seen == [(set(), True)]
    assert stored(root) == {given.header.key}
    assert os.listdir(arena.staging) == []


async def test_a_failed_put_leaves_nothing(
    arena: Arena, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    given = embedding()
    with pytest.raises(StoreFullError, match="No space left") as caught:
        await arena.put(given)
    assert caught.value.key == given.header.key
    assert stored(root) == set() and os.listdir(arena.staging) == []


async def test_adopt_publishes_without_a_copy(arena: Arena, root: Path) -> None:
    given = embedding(MB)
    path = stage(arena, given)
    inode = path.stat().st_ino
    arena.adopt(path, given.header)
    assert not path.exists()
    assert (root / "data" / given.header.key).stat().st_ino == inode
    assert same(await arena.get(given.header.key), given)


async def test_adopt_refuses_a_file_of_the_wrong_size(arena: Arena, root: Path) -> None:
    given = embedding(MB)
    path = stage(arena, embedding(KB))
    with pytest.raises(IntegrityError, match="its header says"):
        arena.adopt(path, given.header)
    assert stored(root) == set()


async def test_a_pin_outlives_delete_and_eviction(root: Path) -> None:
    given, other = embedding(64 * KB), embedding(64 * KB)
    one = Arena(root, quota_bytes=given.header.file_bytes * 3, worker="w1")
    two = Arena(root, quota_bytes=given.header.file_bytes * 3, worker="w2")
    one.open()
    two.open()
    try:
        await one.put(given)
        pinned = one.pin(given.header.key)
        assert pinned is not None and one.pin(given.header.key) == pinned, "pinning twice"
        await one.put(other)
        age(root, given.header.key, other.header.key)
        await two.put(embedding(128 * KB))
        assert given.header.key in stored(root), "the oldest, and pinned by another worker"
        assert other.header.key not in stored(root)
        await two.delete(given.header.key)
        assert await one.get(given.header.key) is None
        assert one.pin(given.header.key) == pinned, "the pin is still there"
        assert same(map_embedding(pinned), given)
        mapped = map_embedding(pinned)
        one.unpin(given.header.key)
        assert one.pin(given.header.key) is None
        assert same(mapped, given), "memory stays under a reader"
        one.unpin(given.header.key)
    finally:
        one.close()
        two.close()


async def test_pin_of_what_is_not_there(arena: Arena) -> None:
    assert arena.pin(secrets.token_hex(32)) is None
    assert os.listdir(arena.pins) == []


async def test_fc28_quota_evicts_the_least_recently_used(root: Path) -> None:
    given = [embedding(64 * KB) for _ in range(4)]
    keys = [each.header.key for each in given]
    arena = Arena(root, quota_bytes=4 * given[0].header.file_bytes, worker="w1")
    arena.open()
    try:
        for each in given:
            await arena.put(each)
        for renew in (arena.contains, arena.get, arena.pin):
            age(root, *keys)
            found: Any = renew(keys[0])
            assert await found if asyncio.iscoroutine(found) else found
            arena.unpin(keys[0])
            extra = embedding(64 * KB)
            await arena.put(extra)
            assert stored(root) == {keys[0], keys[2], keys[3], extra.header.key}, renew.__name__
            assert await arena.used_bytes() <= 4 * given[0].header.file_bytes
            await arena.delete(extra.header.key)
            await arena.put(given[1])
    finally:
        arena.close()


async def test_fc28_everything_pinned_is_full(root: Path) -> None:
    given = [embedding(64 * KB) for _ in range(3)]
    arena = Arena(root, quota_bytes=3 * given[0].header.file_bytes, worker="w1")
    arena.open()
    try:
        for each in given:
            await arena.put(each)
        for each in given[:2]:
            arena.pin(each.header.key)
        with pytest.raises(StoreFullError, match="EPD_ARENA_BYTES") as caught:
            await arena.put(embedding(128 * KB))
        assert caught.value.status == 503 and caught.value.retry_after_s
        assert len(stored(root)) == 3, "nothing is evicted for what cannot fit"
        with pytest.raises(StoreFullError):
            await arena.put(embedding(MB))
        assert len(stored(root)) == 3
        arena.unpin(given[0].header.key)
        await arena.put(embedding(128 * KB))
        assert given[1].header.key in stored(root) and len(stored(root)) == 2
    finally:
        arena.close()


HOLDER = """
import sys
from pathlib import Path
from epd_common.store import Arena

arena = Arena(Path(sys.argv[1]), quota_bytes=1 << 26, worker=sys.argv[2])
arena.open()
for key in sys.argv[3:]:
    assert arena.pin(key) is not None
(arena.staging / "unfinished").write_bytes(bytes(1000))
print("ready", flush=True)
sys.stdin.read()
"""


async def holder(root: Path, worker: str, *keys: str) -> asyncio.subprocess.Process:
    """A process that has the arena open, with pins and an unfinished file."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDER, str(root), worker, *keys),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(20):
        assert await process.stdout.readline() == b"ready\n"
    return process


async def test_fc09_what_a_dead_worker_left_is_swept(arena: Arena, root: Path) -> None:
    given = embedding(64 * KB)
    await arena.put(given)
    process = await holder(root, "other", given.header.key)
    left = [root / "pins" / "other" / given.header.key, root / "staging" / "other" / "unfinished"]
    third = Arena(root, quota_bytes=QUOTA, worker="w3")
    try:
        third.open()
        third.close()
        assert all(path.exists() for path in left), "it lives"
        same_id = Arena(root, quota_bytes=QUOTA, worker="other")
        with pytest.raises(ArenaInUseError, match="EPD_WORKER_ID"):
            same_id.open()
        same_id.close()
        assert all(path.exists() for path in left), "the one refused took nothing with it"
    finally:
        process.kill()
        async with asyncio.timeout(10):
            await process.communicate()
    assert all(path.exists() for path in left), "nobody has swept yet"
    third.open()
    try:
        assert not any(path.exists() for path in left)
        assert not (root / "owners" / "other").exists()
        assert same(await third.get(given.header.key), given), "what it published stays"
    finally:
        third.close()


async def test_a_worker_that_lives_sweeps_what_the_dead_left(
    arena: Arena, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was killed need not come back."""
    monkeypatch.setattr(arena_module, "SWEEP_S", 0.05)
    given = embedding(64 * KB)
    await arena.put(given)
    arena.pin(given.header.key)
    process = await holder(root, "other", given.header.key)
    left = root / "pins" / "other" / given.header.key
    try:
        async with sweeping(arena):
            await asyncio.sleep(0.3)
            assert left.exists(), "it lives"
            assert arena.report()["dead_owners"] == 0
            process.kill()
            async with asyncio.timeout(10):
                await process.communicate()
            await eventually(
                lambda: not left.exists() and not (root / "owners" / "other").exists(),
                "its things are gone",
            )
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert (arena.pins / given.header.key).exists(), "its own stay"
    assert arena.report() | {"root": "", "bytes": 0, "quota_bytes": 0} == {
        "root": "",
        "files": 1,
        "bytes": 0,
        "quota_bytes": 0,
        "pins": 1,
        "staged": 0,
        "dead_owners": 0,
        "dead_pins": 0,
    }


async def test_what_the_dead_left_is_reported(arena: Arena, root: Path) -> None:
    given = embedding(64 * KB)
    await arena.put(given)
    process = await holder(root, "other", given.header.key)
    process.kill()
    async with asyncio.timeout(10):
        await process.communicate()
    report = arena.report()
    assert (report["dead_owners"], report["dead_pins"]) == (1, 1)
    assert arena.sweep() == ["other"]
    report = arena.report()
    assert (report["dead_owners"], report["dead_pins"]) == (0, 0)


async def test_a_worker_takes_its_own_id_again(root: Path) -> None:
    process = await holder(root, "w1")
    process.kill()
    async with asyncio.timeout(10):
        await process.communicate()
    arena = Arena(root, quota_bytes=QUOTA, worker="w1")
    arena.open()
    assert os.listdir(arena.staging) == []
    arena.close()
    assert not arena.pins.exists() and not arena.staging.exists()
    arena.close()


def test_many_workers_open_and_close_at_once(root: Path) -> None:
    """Nobody takes another's fresh lock for that of a dead worker."""
    workers, rounds = 8, 25
    barrier = threading.Barrier(workers)

    def run(number: int) -> None:
        for _ in range(rounds):
            arena = Arena(root, quota_bytes=QUOTA, worker=f"w{number}")
            barrier.wait(20)
            arena.open()
            assert arena.pins.is_dir() and arena.staging.is_dir()
            assert (root / "owners" / f"w{number}").exists()
            arena.close()

    with ThreadPoolExecutor(workers) as pool:
        for result in [pool.submit(run, number) for number in range(workers)]:
            try:
                result.result(timeout=40)
            except BaseException:
                barrier.abort()
                raise


BAD_KEYS = ["", ".", "..", "../x", "a/b", "/etc/passwd", "a" * 63, "A" * 64, "../" + "a" * 61]


@pytest.mark.parametrize("key", BAD_KEYS, ids=range(len(BAD_KEYS)))
async def test_bad_keys_are_refused(arena: Arena, root: Path, key: str) -> None:
    outside = root / "pins" / "x"
    outside.write_bytes(b"do not touch")
    for call in (arena.get, arena.contains, arena.delete):
        with pytest.raises(ValueError, match="not an embedding key"):
            await call(key)
    for plain in (arena.pin, arena.unpin):
        with pytest.raises(ValueError, match="not an embedding key"):
            plain(key)
    bad = Embedding(EmbeddingHeader(key=key, rows=1, width=1, dtype="float16"), memoryview(b"xx"))
    with pytest.raises(ValueError, match="not an embedding key"):
        await arena.put(bad)
    staged = arena.staging / "s"
    staged.write_bytes(bytes(bad.header.file_bytes))
    with pytest.raises(ValueError, match="not an embedding key"):
        arena.adopt(staged, bad.header)
    assert outside.read_bytes() == b"do not touch"
    assert stored(root) == set()


@pytest.mark.parametrize("size", [0, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 10])
async def test_a_cut_off_file_is_none_and_gone(arena: Arena, root: Path, size: int) -> None:
    given = embedding(KB)
    await arena.put(given)
    os.truncate(root / "data" / given.header.key, size)
    assert await arena.get(given.header.key) is None
    assert stored(root) == set()


# -- Redis ---------------------------------------------------------------------------------------


async def ttls(redis: Redis, key: str) -> list[int]:
    names = sorted([name async for name in redis.scan_iter(match=f"epd:v1:emb:{key}*")])
    return [await redis.pttl(name) for name in names]


async def test_every_use_renews_the_time_to_live(redis: Redis) -> None:
    store = RedisEmbeddingStore(redis, ttl_s=TTL_S)
    given = embedding(9 * MB)
    key = given.header.key
    await store.put(given)
    assert len(await ttls(redis, key)) == 4, "a header and three chunks"
    for use in (store.get, store.contains, lambda _: store.put(given)):
        for name in [name async for name in redis.scan_iter(match=f"epd:v1:emb:{key}*")]:
            await redis.pexpire(name, 2000)
        await use(key)
        left = await ttls(redis, key)
        assert len(left) == 4
        assert all(TTL_S * 500 < each <= TTL_S * 1000 for each in left), left


async def test_a_lost_chunk_is_none(redis: Redis) -> None:
    store = RedisEmbeddingStore(redis, ttl_s=TTL_S)
    for number in range(3):
        given = embedding(9 * MB)
        await store.put(given)
        await redis.delete(f"epd:v1:emb:{given.header.key}:{number}")
        assert not await store.contains(given.header.key)
        assert await store.get(given.header.key) is None
        await store.put(given)
        assert same(await store.get(given.header.key), given)


async def test_bringing_is_verified_and_leaves_all_or_nothing(
    redis: Redis, arena: Arena, root: Path
) -> None:
    store = RedisEmbeddingStore(redis, ttl_s=TTL_S)
    given = embedding(9 * MB)
    key = given.header.key
    assert await store.bring(key, (), arena, lambda _: True) is None
    await store.put(given)
    assert await store.bring(key, (), arena, lambda _: True) == given.header
    assert same(await arena.get(key), given)
    assert await store.contains(key), "it is a copy"
    await arena.delete(key)
    await redis.setrange(f"epd:v1:emb:{key}:2", 100, b"\xaa\x55\xaa\x55")  # of the last part
    assert await store.bring(key, (), arena, lambda _: True) is None
    assert not await arena.contains(key) and list(arena.staging.iterdir()) == []
    assert not await store.contains(key), "who makes it again can put it"
    await store.aclose()


async def test_what_does_not_fit_is_not_brought_but_deleted(redis: Redis, arena: Arena) -> None:
    store = RedisEmbeddingStore(redis, ttl_s=TTL_S)
    given = embedding()
    await store.put(given)
    asked: list[EmbeddingHeader] = []
    assert await store.bring(given.header.key, (), arena, asked.append) is None  # type: ignore[arg-type]
    assert asked == [given.header]
    assert not await arena.contains(given.header.key)
    assert not await store.contains(given.header.key)


async def test_a_full_arena_says_so_and_the_store_keeps_what_it_has(
    redis: Redis, arena: Arena
) -> None:
    """It is the arena's fault, and not that of Valkey, nor of the embedding."""
    store = RedisEmbeddingStore(redis, ttl_s=TTL_S)
    pinned, given = embedding(60 * MB), embedding(9 * MB)
    await arena.put(pinned)
    assert arena.pin(pinned.header.key)
    await store.put(given)
    with pytest.raises(ArenaFullError):
        await store.bring(given.header.key, (), arena, lambda _: True)
    assert list(arena.staging.iterdir()) == []
    assert same(await store.get(given.header.key), given)
    await store.delete(given.header.key)


@pytest.mark.parametrize("junk", [b"", b"junk", b"\x00" * HEADER_BYTES])
async def test_a_damaged_header_is_none(redis: Redis, junk: bytes) -> None:
    store = RedisEmbeddingStore(redis, ttl_s=TTL_S)
    given = embedding()
    await store.put(given)
    await redis.set(f"epd:v1:emb:{given.header.key}", junk, ex=TTL_S)
    assert not await store.contains(given.header.key)
    assert await store.get(given.header.key) is None


async def test_no_memory_left_is_full_and_then_unavailable(tmp_path: Path) -> None:
    given = embedding(9 * MB)
    async with (
        embedded_brokers(tmp_path, nats=False, redis_maxmemory_bytes=12 * MB) as brokers,
        open_redis(brokers.redis_url) as client,
    ):
        store = RedisEmbeddingStore(client, ttl_s=TTL_S, bound_bytes=64 * MB)
        small = embedding()
        await store.put(small)
        with pytest.raises(StoreFullError, match="is full") as caught:
            for _ in range(3):
                await store.put(embedding(9 * MB, given.header.key))
                await store.put(embedding(9 * MB))
        assert caught.value.retry_after_s
        assert same(await store.get(small.header.key), small), "nothing was evicted for it"
        with pytest.raises(StoreFullError):
            await MediaStore(client, ttl_s=TTL_S).put(
                bytes(9 * MB), digest="d" * 64, content_type="image/png"
            )
        await brokers.redis.stop()
        with pytest.raises(UnavailableError, match="EPD_REDIS_URL"):
            await store.get(small.header.key)


async def test_nothing_answers_at_the_address() -> None:
    with pytest.raises(UnavailableError, match="EPD_REDIS_URL"):
        async with asyncio.timeout(10), open_redis("unix:///nowhere/at/all.sock"):
            pass


async def test_what_is_held_is_not_in_the_engines_sight_until_exposed(arena: Arena) -> None:
    given = embedding()
    key = given.header.key
    await arena.put(given)
    held = arena.hold(key)
    assert held is not None and held.exists()
    assert not (arena.pins / key).exists()
    await arena.delete(key)
    assert arena.hold(key) == held, "an eviction does not take it"
    arena.expose(key)
    assert (arena.pins / key).exists() and not held.exists()
    assert arena.hold(key) == arena.pins / key, "held again, it is the pin"
    arena.expose(key)
    arena.unpin(key)
    assert list(arena.pins.iterdir()) == []


async def test_a_name_that_is_no_file_holds_nobody_up(root: Path) -> None:
    """A pipe would keep its reader waiting for a writer."""
    arena = Arena(root, quota_bytes=1 << 20, worker="w")
    arena.open()
    key = "a" * 64
    os.mkfifo(root / "data" / key)
    assert await asyncio.wait_for(arena.get(key), 5) is None
    arena.close()


async def test_a_burst_waits_for_connections(redis_url: str) -> None:
    async with open_redis(redis_url) as redis:
        await asyncio.gather(*(redis.ping() for _ in range(1000)))
        connected = await redis.client_list()
        assert len(connected) <= MAX_CONNECTIONS + 16  # other tests have some
