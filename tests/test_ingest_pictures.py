"""Real files of every supported type, whole and broken; sizes are compared with what vLLM's reader does."""

from __future__ import annotations

import asyncio
import io
import struct
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from PIL import Image, ImageFile, ImageOps

from epd_common.decoding.pictures import CorruptError, decode
from epd_common.decoding.pool import DecodeMemoryError, DecoderPool, DecodeTimeoutError
from epd_common.errors import (
    BadRequestError,
    BusyError,
    EpdError,
    TooLargeError,
    UnsupportedMediaError,
)
from epd_common.ingest import IngestLimits, Picture, PictureChecker
from epd_common.ingest.hopeless import KEPT_S, MAX_KEPT, Hopeless

PLACE = "messages[0].content[1]"
NOISE = Image.effect_noise((40, 24), 100).convert("RGB")


def picture(kind: str = "PNG", image: Image.Image = NOISE, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has one byte of pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0"))
        + chunk(b"IEND", b"")
    )


FILES = {
    "png": picture("PNG"),
    "jpeg": picture("JPEG"),
    "jpeg-progressive": picture("JPEG", progressive=True),
    "webp": picture("WEBP"),
    "webp-lossless": picture("WEBP", lossless=True),
    "gif": picture("GIF"),
    "bmp": picture("BMP"),
    "tiff": picture("TIFF"),
}


@pytest.fixture(scope="module")
async def checker() -> AsyncIterator[PictureChecker]:
    async with PictureChecker(IngestLimits(decode_workers=1)) as running:
        yield running


@pytest.mark.parametrize("name", FILES)
async def test_whole_files_pass(checker: PictureChecker, name: str) -> None:
    found = await checker.check(FILES[name], place=PLACE)
    assert found == Picture(f"image/{name.partition('-')[0]}", 40, 24)


@pytest.mark.parametrize("name", FILES)
async def test_truncated_files_are_refused(checker: PictureChecker, name: str) -> None:
    whole = FILES[name]
    for missing in (4, 40, len(whole) // 2):
        with pytest.raises(BadRequestError, match="truncated or corrupt") as caught:
            await checker.check(whole[:-missing], place=PLACE)
        assert (caught.value.code, caught.value.param) == ("invalid_image", PLACE)


async def test_truncated_files_are_refused_where_another_library_tolerates_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    cut = FILES["jpeg"][:-40]
    Image.open(io.BytesIO(cut)).load()
    with pytest.raises(CorruptError):
        decode(cut, 10_000)


@pytest.mark.parametrize("before_end", [200, 9])
async def test_a_png_with_a_flipped_bit_is_refused(
    checker: PictureChecker, before_end: int
) -> None:
    """In the pixels, and in their checksum, which Pillow does not read while it loads."""
    whole = bytearray(FILES["png"])
    whole[whole.index(b"IEND") + 4 - before_end] ^= 0x10
    with pytest.raises(BadRequestError) as caught:
        await checker.check(bytes(whole), place=PLACE)
    assert caught.value.code == "invalid_image"


async def test_a_picture_with_a_turned_half_broken_file_is_refused(checker: PictureChecker) -> None:
    """vLLM ignores the failure of the turning, and then loads what the first try left behind."""
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = picture("JPEG", exif=exif)
    with pytest.raises(BadRequestError):
        await checker.check(whole[: len(whole) * 3 // 4], place=PLACE)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
async def test_size_is_that_of_the_turned_picture(
    checker: PictureChecker, kind: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = picture(kind, exif=exif)
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    found = await checker.check(data, place=PLACE)
    assert (found.width, found.height) == shown.size
    assert (found.width > found.height) == (orientation < 5)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
async def test_png_modes(checker: PictureChecker, mode: str) -> None:
    data = picture("PNG", Image.new(mode, (5, 3)))
    assert await checker.check(data, place=PLACE) == Picture("image/png", 5, 3)


async def test_cmyk_passes(checker: PictureChecker) -> None:
    data = picture("JPEG", Image.new("CMYK", (5, 3)))
    assert await checker.check(data, place=PLACE) == Picture("image/jpeg", 5, 3)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
async def test_animations_count_as_their_first_frame(checker: PictureChecker, kind: str) -> None:
    frames = [Image.effect_noise((30, 20), 100).convert("RGB") for _ in range(3)]
    data = picture(kind, frames[0], save_all=True, append_images=frames[1:])
    found = await checker.check(data, place=PLACE)
    assert (found.width, found.height) == (30, 20)


@pytest.mark.parametrize(
    "declared",
    ["", "image/png", "IMAGE/JPEG; q=1", "image/x-unknown", "application/octet-stream"],
)
async def test_a_wrong_image_type_is_tolerated(checker: PictureChecker, declared: str) -> None:
    found = await checker.check(FILES["png"], declared=declared, place=PLACE)
    assert found.content_type == "image/png"


@pytest.mark.parametrize(
    ("data", "declared"),
    [
        (FILES["png"], "text/html"),
        (FILES["png"], "text/html; charset=utf-8"),
        (FILES["png"], "video/mp4"),
        (b"<!doctype html><p>not found", ""),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "image/png"),
        (b"\0\0\0 ftypisom", "image/png"),
        (b"GIF", "image/gif"),
        (b"", "image/png"),
    ],
)
async def test_what_is_no_picture(checker: PictureChecker, data: bytes, declared: str) -> None:
    with pytest.raises(UnsupportedMediaError) as caught:
        await checker.check(data, declared=declared, place=PLACE)
    assert (caught.value.status, caught.value.param) == (415, PLACE)


@pytest.mark.parametrize("head", [entry[:24] for entry in FILES.values()], ids=FILES)
async def test_garbage_behind_a_good_beginning(checker: PictureChecker, head: bytes) -> None:
    with pytest.raises(BadRequestError) as caught:
        await checker.check(head + b"\xa5" * 500, place=PLACE)
    assert caught.value.code == "invalid_image"


@pytest.mark.parametrize("size", [(10_001, 10_000), (100_000, 100_000), (2**31 - 1, 2**31 - 1)])
async def test_fc16_too_many_pixels_are_seen_in_the_header(
    checker: PictureChecker, size: tuple[int, int]
) -> None:
    with pytest.raises(TooLargeError) as caught:
        await checker.check(png_header(*size), place=PLACE)
    assert (caught.value.status, caught.value.code) == (413, "too_many_pixels")
    assert caught.value.param == PLACE


async def test_limits_are_inclusive() -> None:
    data = FILES["png"]
    exact = IngestLimits(max_media_bytes=len(data), max_pixels=40 * 24)
    async with PictureChecker(exact) as checker:
        await checker.check(data, place=PLACE)
    async with PictureChecker(IngestLimits(max_media_bytes=len(data) - 1)) as checker:
        with pytest.raises(TooLargeError) as caught:
            await checker.check(data, place=PLACE)
    assert caught.value.code == "media_too_large"
    async with PictureChecker(IngestLimits(max_pixels=40 * 24 - 1)) as checker:
        with pytest.raises(TooLargeError) as caught:
            await checker.check(data, place=PLACE)
    assert caught.value.code == "too_many_pixels"


class Blocker:
    """Stands in for the decode: each call waits in its thread until it is let go."""

    def __init__(self) -> None:
        self.started = asyncio.Semaphore(0)
        self.go = asyncio.Event()
        self.seen: list[bytes] = []

    async def __call__(self, data: bytes, _: int) -> Picture:
        self.seen.append(data)
        self.started.release()
        async with asyncio.timeout(10):
            await self.go.wait()
        return Picture("image/png", 1, 1)


@pytest.fixture
def blocker(monkeypatch: pytest.MonkeyPatch) -> Blocker:
    blocking = Blocker()
    monkeypatch.setattr(DecoderPool, "decode", blocking)
    return blocking


async def test_a_full_queue_is_answered_429(blocker: Blocker) -> None:
    limits = IngestLimits(decode_workers=1, decode_queue=1)
    async with PictureChecker(limits) as checker, asyncio.TaskGroup() as group:
        running = group.create_task(checker.check(FILES["png"], place="a"))
        await blocker.started.acquire()
        waiting = group.create_task(checker.check(FILES["png"], place="b"))
        await asyncio.sleep(0)
        with pytest.raises(BusyError) as caught:
            await checker.check(FILES["png"], place="c")
        assert caught.value.retry_after_s
        blocker.go.set()
        assert await running == await waiting == Picture("image/png", 1, 1)


async def test_a_cancelled_check_frees_its_slot_when_the_decode_ends(blocker: Blocker) -> None:
    async with PictureChecker(IngestLimits(decode_workers=1)) as checker:
        check = asyncio.ensure_future(checker.check(FILES["png"], place=PLACE))
        await blocker.started.acquire()
        check.cancel()
        with pytest.raises(asyncio.CancelledError):
            await check
        blocker.go.set()
        assert await checker.check(FILES["png"], place=PLACE) == Picture("image/png", 1, 1)


async def test_another_tenants_picture_waits_behind_nobody(blocker: Blocker) -> None:
    limits = IngestLimits(decode_workers=2)
    async with (
        PictureChecker(limits, several=lambda: True) as checker,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(20):
            group.create_task(checker.check(FILES["png"], place="a", owner="a"))
        await blocker.started.acquire()
        group.create_task(checker.check(FILES["gif"], place="b", owner="b"))
        await blocker.started.acquire()
        blocker.go.set()
        assert blocker.seen[:2] == [FILES["png"], FILES["gif"]]


async def test_tenants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[bytes] = []

    async def decode(_: object, data: bytes, __: int) -> Picture:
        order.append(data[-2:])
        return Picture("image/png", 1, 1)

    monkeypatch.setattr(DecoderPool, "decode", decode)
    limits = IngestLimits(decode_workers=1)
    async with (
        PictureChecker(limits, several=lambda: True) as checker,
        asyncio.TaskGroup() as group,
    ):
        for name in ("a0", "a1", "a2", "b0", "b1", "c0"):
            data = FILES["png"] + name.encode()
            group.create_task(checker.check(data, place="x", owner=name[0]))
    assert order == [b"a0", b"a1", b"b0", b"c0", b"a2", b"b1"]


@pytest.mark.parametrize("fault", [DecodeTimeoutError, DecodeMemoryError])
async def test_what_took_too_much_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
) -> None:
    tried = 0

    async def decode(*_: object) -> Picture:
        nonlocal tried
        tried += 1
        raise fault

    monkeypatch.setattr(DecoderPool, "decode", decode)
    codes = set()
    async with PictureChecker(IngestLimits(decode_workers=1)) as checker:

        async def check(owner: str, digest: str) -> None:
            with pytest.raises(EpdError) as caught:
                await checker.check(FILES["png"], place=PLACE, owner=owner, digest=digest)
            assert caught.value.param == PLACE
            codes.add(caught.value.code)

        await asyncio.gather(*(check("a", "1") for _ in range(8)))
        await check("a", "1")
        assert tried == 1
        await check("a", "2")
        await check("b", "1")  # a tenant learns nothing of another's
        await check("", "")
        await check("", "")
        assert tried == 5
    assert codes == {"decode_timeout" if fault is DecodeTimeoutError else "decode_memory"}


async def test_what_is_only_broken_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with PictureChecker(IngestLimits(decode_workers=1)) as checker:
        with pytest.raises(BadRequestError):
            await checker.check(FILES["png"][:-9], place=PLACE, digest="1")
        await checker.check(FILES["png"], place=PLACE, digest="1")


def test_the_hopeless_are_forgotten() -> None:
    now = 0.0
    hopeless = Hopeless(lambda: now)
    hopeless.add("a", "first", DecodeTimeoutError)
    assert hopeless.find("a", "first") is DecodeTimeoutError
    assert hopeless.find("b", "first") is None
    now = KEPT_S
    assert hopeless.find("a", "first") is None
    hopeless.add("a", "first", DecodeTimeoutError)
    for n in range(MAX_KEPT):
        hopeless.add("a", str(n), DecodeMemoryError)
    assert hopeless.find("a", "first") is None
    assert hopeless.find("a", "0") is DecodeMemoryError


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_items"):
        IngestLimits(max_items=0)
