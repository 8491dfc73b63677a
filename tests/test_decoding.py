"""The processes that decode: what they may not do, and what becomes of a picture over which one dies."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from PIL import Image
from PIL.ExifTags import Base
from PIL.JpegImagePlugin import jpeg_factory

from epd_common.decoding.child import HEAD, READY, allowed_s
from epd_common.decoding.pictures import CorruptError, Picture, TooManyPixelsError, decode
from epd_common.decoding.pool import (
    DecodeMemoryError,
    DecoderDiedError,
    DecoderPool,
    DecoderStartError,
    DecodeTimeoutError,
)
from epd_common.decoding.structure import TooComplexError
from epd_common.errors import EpdError
from epd_common.ingest import IngestLimits, PictureChecker
from hostile_media import scanned
from service_stack import eventually, picture

MIB = 1 << 20
PIXELS = 100_000_000
EIGHT = Picture("image/png", 8, 8)


def plain(width: int, height: int, kind: str = "PNG") -> bytes:
    """A picture that is small as a file and large when it is decoded."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (1, 2, 3)).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
async def pool() -> AsyncIterator[DecoderPool]:
    made = DecoderPool(memory_bytes=64 * MIB, timeout_s=20.0)
    yield made
    await made.close()
    assert made.idle_pids == []


async def test_a_process_is_used_again(pool: DecoderPool) -> None:
    assert await pool.decode(picture(), PIXELS) == EIGHT
    (pid,) = pool.idle_pids
    for data in (picture(), picture()[:-20]):
        try:
            assert await pool.decode(data, PIXELS) == EIGHT
        except CorruptError:
            pass
        assert pool.idle_pids == [pid]
    with pytest.raises(TooComplexError, match="more than 100 scans"):
        await pool.decode(scanned(101), PIXELS)
    assert pool.idle_pids == [pid]
    with pytest.raises(TooManyPixelsError, match="64"):
        await pool.decode(picture(), 63)
    assert pool.idle_pids == [pid]


async def test_memory_is_bounded(pool: DecoderPool) -> None:
    with pytest.raises(DecodeMemoryError):
        await pool.decode(plain(6000, 6000), PIXELS)  # 144 MB decoded
    assert await pool.decode(picture(), PIXELS) == EIGHT


async def test_what_a_process_has_and_may(
    pool: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPD_NATS_URL", "nats://user:secret@localhost")
    await pool.decode(picture(), PIXELS)
    (pid,) = pool.idle_pids
    proc = Path(f"/proc/{pid}")
    assert b"secret" not in proc.joinpath("environ").read_bytes()
    limits = {
        line[:26].strip(): line[26:].split()[0]
        for line in proc.joinpath("limits").read_text().splitlines()[1:]
    }
    assert int(limits["Max address space"]) < 400 * MIB
    assert (limits["Max core file size"], limits["Max file size"]) == ("0", "0")
    assert limits["Max processes"] == "0"
    assert int(limits["Max open files"]) <= 16
    assert proc.joinpath("oom_score_adj").read_text().strip() == "1000"
    opened = [os.readlink(entry) for entry in proc.joinpath("fd").iterdir()]
    assert sum("socket:" in name for name in opened) == 1, opened


async def test_time_is_bounded_by_the_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_common.decoding.pool.GRACE_S", 60.0)
    short = DecoderPool(memory_bytes=1024 * MIB, timeout_s=0.01)
    try:
        with pytest.raises(DecodeTimeoutError):
            await short.decode(plain(8000, 8000), PIXELS)
        assert short.idle_pids == []
    finally:
        await short.close()


def test_a_processors_time_is_bounded_by_bytes_and_pixels() -> None:
    assert allowed_s(0, 0) < allowed_s(1 << 20, 0) < allowed_s(1 << 20, 1_000_000)
    assert allowed_s(600_000, PIXELS) < IngestLimits().decode_timeout_s / 2


@pytest.mark.parametrize("constant", ["BASE_S", "none"])
def test_what_takes_a_processor_for_too_long_ends(constant: str) -> None:
    """However much time the clock would leave it."""
    program = (
        "import sys; from epd_common.decoding import child; sys.argv[1:] = ['2000000000']; "
        f"child.MEGAPIXEL_S = child.MEBIBYTE_S = 0; child.{constant} = 0.05; child.main()"
    )
    ours, theirs = socket.socketpair()
    data = plain(8000, 8000)
    with ours, theirs:
        process = subprocess.Popen([sys.executable, "-c", program], stdin=theirs.fileno())
        theirs.close()
        assert ours.recv(1) == READY
        ours.sendall(HEAD.pack(len(data), PIXELS, 60.0) + data)
        answer = ours.recv(4)
        if constant == "none":
            assert answer  # 3 s are enough
            process.kill()
        else:
            assert process.wait(30) == -signal.SIGPROF
        process.wait(30)


async def test_a_process_that_took_too_long_of_a_processor_is_a_timeout(pool: DecoderPool) -> None:
    await pool.decode(picture(), PIXELS)
    (pid,) = pool.idle_pids
    os.kill(pid, signal.SIGSTOP)
    decoding = asyncio.create_task(pool.decode(picture(), PIXELS))
    await eventually(lambda: pool.idle_pids == [], "it has the picture")
    os.kill(pid, signal.SIGPROF)
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(DecodeTimeoutError):
        await decoding


async def test_time_is_bounded_by_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_common.decoding.pool.GRACE_S", 0.05)
    stopped = DecoderPool(memory_bytes=64 * MIB, timeout_s=0.2)
    try:
        await stopped.decode(picture(), PIXELS)
        (pid,) = stopped.idle_pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DecodeTimeoutError):
            await stopped.decode(picture(), PIXELS)
        assert not psutil.pid_exists(pid)
        assert await stopped.decode(picture(), PIXELS) == EIGHT
    finally:
        await stopped.close()


async def test_one_that_ended_while_it_waited_is_replaced(pool: DecoderPool) -> None:
    await pool.decode(picture(), PIXELS)
    (pid,) = pool.idle_pids
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)], timeout=10)
    assert await pool.decode(picture(), PIXELS) == EIGHT
    assert pool.idle_pids != [pid]


async def test_one_that_dies_over_a_picture_costs_that_picture(pool: DecoderPool) -> None:
    await pool.decode(picture(), PIXELS)
    (pid,) = pool.idle_pids
    os.kill(pid, signal.SIGSTOP)
    decoding = asyncio.create_task(pool.decode(picture(), PIXELS))
    await eventually(lambda: pool.idle_pids == [], "it has the picture")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DecoderDiedError, match="-9"):
        await decoding
    assert await pool.decode(picture(), PIXELS) == EIGHT


async def test_one_that_talks_nonsense_is_ended(
    pool: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pool.decode(picture(), PIXELS)
    (pid,) = pool.idle_pids
    for nonsense in (b"[]", b"{}", b"\xff", b'{"width": 1}', b'{"fault": "other", "text": ""}'):
        await pool.decode(picture(), PIXELS)
        (pid,) = pool.idle_pids
        with monkeypatch.context() as patch:
            answers = SimpleNamespace(loads=_always(nonsense))
            patch.setattr("epd_common.decoding.pool.json", answers)
            with pytest.raises(DecoderDiedError):
                await pool.decode(picture(), PIXELS)
        assert not psutil.pid_exists(pid)


def _always(raw: bytes) -> Callable[[bytes], object]:
    return lambda _: json.loads(raw)


async def test_one_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "none"))
    none = DecoderPool(memory_bytes=MIB, timeout_s=1.0)
    with pytest.raises(DecoderStartError, match="No such file"):
        await none.decode(picture(), PIXELS)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (DecodeMemoryError(), 413, "decode_memory"),
        (TooComplexError("more than 100 scans"), 413, "image_too_complex"),
        (DecodeTimeoutError(), 400, "decode_timeout"),
        (DecoderDiedError("exit code -11"), 400, "invalid_image"),
        (DecoderStartError("no"), 503, "unavailable"),
    ],
)
async def test_what_the_sender_is_told(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, code: str
) -> None:
    async def fail(*_: object) -> Picture:
        raise error

    monkeypatch.setattr(DecoderPool, "decode", fail)
    async with PictureChecker(IngestLimits(decode_workers=1)) as checker:
        for _ in range(2):  # and its slot is free again
            with pytest.raises(EpdError) as caught:
                await checker.check(picture(), place="messages[0].content[1]")
            assert (caught.value.status, caught.value.code) == (status, code)
            if status < 500:
                assert caught.value.param == "messages[0].content[1]"


async def test_no_process_stays() -> None:
    async with PictureChecker(IngestLimits(decode_workers=2)) as checker:
        await asyncio.gather(*(checker.check(picture(), place="x") for _ in range(8)))
        pids = checker.pool.idle_pids
        assert 1 <= len(pids) <= 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def jpegs() -> list[bytes]:
    """One of each way to write a JPEG."""
    noise = [Image.effect_noise((61, 83), 60) for _ in range(4)]
    found = []
    for mode, bands in (("RGB", noise[:3]), ("L", noise[:1]), ("CMYK", noise)):
        for how in ({}, {"progressive": True}, {"restart_marker_blocks": 4}, {"subsampling": 0}):
            buffer = io.BytesIO()
            Image.merge(mode, bands).save(buffer, "JPEG", **how)
            found.append(buffer.getvalue())
    return found


def damaged(data: bytes, rng: random.Random) -> bytes:
    place, more = rng.randrange(len(data)), rng.randrange(1, 200)
    match rng.randrange(4):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + rng.randbytes(1) + data[place + 1 :]
        case 2:
            return data[:place] + data[place + more :]
        case _:
            return data[:place] + rng.randbytes(more) + data[place:]


def verdict(read: Callable[[], tuple[int, int]]) -> tuple[int, int] | str:
    try:
        return read()
    except Exception as error:  # Pillow's readers raise nearly anything on damaged files
        return str(error)


@pytest.mark.filterwarnings("ignore")
def test_what_is_wrong_with_a_jpeg_is_found_at_an_eighth_of_its_size() -> None:
    rng = random.Random(1)
    whole = jpegs()
    verdicts = set()
    for _ in range(1500):
        data = damaged(rng.choice(whole), rng)

        def quick(data: bytes = data) -> tuple[int, int]:
            found = decode(data, 1_000_000)
            return found.width, found.height

        def full(data: bytes = data) -> tuple[int, int]:
            with jpeg_factory(io.BytesIO(data), "") as image:
                if image.width * image.height > 1_000_000:
                    raise ValueError(str(image.width * image.height))
                image.load()
                return image.size if image.getexif().get(Base.Orientation, 1) < 5 else (0, 0)

        if data.startswith(b"\xff\xd8\xff"):
            found = verdict(quick)
            assert found == verdict(full)
            verdicts.add(type(found))
    assert verdicts == {tuple, str}
