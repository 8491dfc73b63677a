"""What an engine's requests hold in the arena: checked once, and let go of with the last request."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from epd_common.store import Arena, Embedding, EmbeddingHeader, IntegrityError
from epd_common.store.embedding import HEADER_BYTES, pack_header, payload_checksum, unpack_header
from epd_vllm.arena_pins import ArenaPins, Fit, Holding

FIT = Fit(fingerprint="f" * 64, width=8, dtype="float32")
ROWS = 4
QUOTA = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "arena"


@pytest.fixture
def producer(root: Path) -> Iterator[Arena]:
    arena = Arena(root, quota_bytes=QUOTA, worker="producer")
    arena.open()
    yield arena
    arena.close()


@pytest.fixture
def pins(root: Path) -> Iterator[ArenaPins]:
    arena = Arena(root, quota_bytes=QUOTA, worker="consumer")
    arena.open()
    pins = ArenaPins(arena, FIT)
    yield pins
    pins.close()


async def publish(arena: Arena, key: str = "", fit: Fit = FIT) -> str:
    payload = secrets.token_bytes(ROWS * 8 * 4)
    header = EmbeddingHeader(
        key=key or secrets.token_hex(32),
        rows=ROWS,
        width=fit.width,
        dtype=fit.dtype,
        fingerprint=fit.fingerprint,
        checksum=payload_checksum(payload),
    )
    await arena.put(Embedding(header, memoryview(payload)[: header.payload_bytes]))
    return header.key


def settled(pins: ArenaPins, key: str, request: str, rows: int = ROWS) -> Holding:
    """Ask until the checksum is computed, as the scheduler does from pass to pass."""
    end = time.monotonic() + 10
    while (holding := pins.acquire(key, request, rows)) is Holding.CHECKING:
        assert time.monotonic() < end
    return holding


def held(root: Path) -> list[str]:
    return [path.name for path in (root / "pins" / "consumer").iterdir()]


async def test_held_until_its_last_request_ends(
    root: Path, producer: Arena, pins: ArenaPins
) -> None:
    key = await publish(producer)
    assert not pins.ready(key)
    assert settled(pins, key, "one") is Holding.READY
    assert pins.ready(key)
    assert settled(pins, key, "two") is Holding.READY
    producer.discard(key)
    assert settled(pins, key, "one") is Holding.READY, "an eviction does not take it"
    pins.release("one")
    assert pins.ready(key) and pins.path(key).exists()
    assert pins.users(key) == {"two"}
    pins.release("two")
    assert not pins.ready(key)
    assert held(root) == []
    assert pins.acquire(key, "three", ROWS) is Holding.MISSING


async def test_missing_is_no_error_and_may_come_later(producer: Arena, pins: ArenaPins) -> None:
    key = secrets.token_hex(32)
    assert pins.acquire(key, "one", ROWS) is Holding.MISSING
    assert pins.users(key) == frozenset()
    await publish(producer, key)
    assert settled(pins, key, "one") is Holding.READY


async def test_the_engine_sees_it_only_when_it_was_verified(
    root: Path, producer: Arena, pins: ArenaPins
) -> None:
    key = await publish(producer)
    if pins.acquire(key, "one", ROWS) is Holding.CHECKING:
        assert held(root) == [f".{key}"]
        assert not pins.ready(key)
    pins.release("one")
    assert held(root) == []


def cut(data: bytes) -> bytes:
    return data[:-5]


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def no_header(data: bytes) -> bytes:
    return b"x" * len(data)


def header_cut(data: bytes) -> bytes:
    return data[: HEADER_BYTES - 1]


def other_key(data: bytes) -> bytes:
    header = msgspec.structs.replace(unpack_header(data), key="0" * 64)
    return pack_header(header) + data[HEADER_BYTES:]


@pytest.mark.parametrize("damage", [cut, flip, no_header, header_cut, other_key])
async def test_a_damaged_one_is_refused_and_taken_out(
    root: Path, producer: Arena, pins: ArenaPins, damage: object
) -> None:
    assert callable(damage)
    key = await publish(producer)
    path = root / "data" / key
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(IntegrityError):
        settled(pins, key, "one")
    assert held(root) == [] and not path.exists()
    assert not pins.ready(key)
    assert pins.acquire(key, "one", ROWS) is Holding.MISSING
    await publish(producer, key)
    assert settled(pins, key, "one") is Holding.READY, "it can be published again"


@pytest.mark.parametrize(
    "fit",
    [replace(FIT, fingerprint="e" * 64), replace(FIT, width=4), replace(FIT, dtype="float16")],
)
async def test_another_models_is_refused(producer: Arena, pins: ArenaPins, fit: Fit) -> None:
    key = await publish(producer, fit=fit)
    with pytest.raises(IntegrityError, match="another model"):
        pins.acquire(key, "one", ROWS)


async def test_other_rows_are_the_requests_fault(
    root: Path, producer: Arena, pins: ArenaPins
) -> None:
    key = await publish(producer)
    with pytest.raises(IntegrityError, match="4 rows for 5 placeholders"):
        pins.acquire(key, "liar", ROWS + 1)
    assert held(root) == []
    assert settled(pins, key, "one") is Holding.READY, "it is still there"
    with pytest.raises(IntegrityError, match="4 rows for 5 placeholders"):
        pins.acquire(key, "liar", ROWS + 1)
    assert pins.ready(key) and pins.users(key) == {"one"}, "and whoever holds it keeps it"
