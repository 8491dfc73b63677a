"""Files that are small and take long are refused by the number of their parts; real ones are not."""

from __future__ import annotations

import io
import random
import struct
import time
from typing import Any

import pytest
from PIL import Image

from epd_common.decoding.pictures import decode
from epd_common.decoding.structure import (
    MAX_CHUNKS,
    MAX_SCANS,
    MAX_SEGMENTS,
    MAX_TAGS,
    MAX_VALUES,
    TooComplexError,
    check_structure,
)
from hostile_media import chunk, files, png, saved, scanned

SOON_S = 2.0
"""For what takes milliseconds."""


def scans(data: bytes) -> int:
    return data.count(b"\xff\xda")


def tiff(tags: list[tuple[int, int, int, int]], data: bytes = b"", big: bool = False) -> bytes:
    """A directory with these tags (number, type, count, value), then data."""
    if big:
        head = b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, len(tags))
        return head + b"".join(struct.pack("<HHQQ", *tag) for tag in tags) + b"\0" * 8 + data
    head = b"II*\0" + struct.pack("<LH", 8, len(tags))
    return head + b"".join(struct.pack("<HHLL", *tag) for tag in tags) + b"\0" * 4 + data


def striped(rows: int, kind: int = 4) -> list[tuple[int, int, int, int]]:
    """A picture of one pixel a row, each in a strip."""
    found = [(256, 4, 1, 1), (257, 4, 1, rows), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    return [*found, (273, kind, rows, 8), (277, 3, 1, 1), (278, 4, 1, 1), (279, 4, 1, 1)]


TAGGED = [(1000 + n, 3, 1, 0) for n in range(MAX_TAGS)]


@pytest.mark.parametrize("name", files())
def test_real_files_pass(name: str) -> None:
    decode(files()[name], 1_000_000)


@pytest.mark.parametrize(
    ("data", "content_type", "text"),
    [
        (scanned(MAX_SCANS), "image/jpeg", "scans"),
        (b"\xff\xd8" + b"\xff\xef\0\2" * 2_000_000, "image/jpeg", "segments"),
        (b"\xff\xd8" + b"\xff\xd0" * 2_000_000, "image/jpeg", "segments"),
        (png(1, 1, None, chunk(b"teSt", b"abc") * 1_000_000), "image/png", "chunks"),
        (tiff(striped(2_000_000), b"\0" * 8_000_000), "image/tiff", "values"),
        (tiff(striped(MAX_VALUES + 1, kind=5), b"\0" * 1_700_000), "image/tiff", "values"),
        (tiff(striped(2_000_000), b"\0" * 8_000_000, big=True), "image/tiff", "values"),
        (tiff([*TAGGED, (1, 1, 1, 1)]), "image/tiff", "tags"),
        (b"MM\0*\0\0\0\x08\xff\xff" + b"\0" * 12 * 65_535, "image/tiff", "tags"),
    ],
    ids=["scans", "segments", "restarts", "chunks", "strips", "rationals", "big", "tags", "MM"],
)
def test_too_many_parts(data: bytes, content_type: str, text: str) -> None:
    started = time.monotonic()
    with pytest.raises(TooComplexError, match=text):
        decode(data, 100_000_000)
    assert time.monotonic() - started < SOON_S
    with pytest.raises(TooComplexError):
        check_structure(data, content_type)


def test_as_many_as_may_be() -> None:
    own = scans(scanned(0))
    decode(scanned(MAX_SCANS - own), 10_000)
    with pytest.raises(TooComplexError):
        decode(scanned(MAX_SCANS - own + 1), 10_000)
    decode(png(1, 1, None, chunk(b"teSt", b"") * (MAX_CHUNKS - 3)), 10_000)
    with pytest.raises(TooComplexError):
        decode(png(1, 1, None, chunk(b"teSt", b"") * (MAX_CHUNKS - 2)), 10_000)
    check_structure(tiff(striped(MAX_VALUES), b"\0" * 4 * MAX_VALUES), "image/tiff")
    check_structure(tiff(striped(MAX_VALUES + 1)), "image/tiff")  # which are not there
    check_structure(tiff(TAGGED), "image/tiff")


def test_exif_data_have_a_size_too() -> None:
    many = tiff([(0x0112, 5, MAX_VALUES + 1, 26)], b"\0" * 8 * (MAX_VALUES + 1))
    with pytest.raises(TooComplexError, match="values"):
        decode(png(2, 2, None, chunk(b"eXIf", many)), 10_000)


def test_what_only_looks_like_scans_does_not_count() -> None:
    """In a camera's own data, a preview picture, and a film behind the picture."""
    noise = b"\xff\xda" * 20_000
    whole = saved("JPEG", exif=b"Exif\0\0" + noise)
    decode(whole + noise, 10_000)
    decode(saved("JPEG", comment=noise), 10_000)


def test_restarts_in_a_scan_do_not_count() -> None:
    whole = saved("JPEG", Image.effect_noise((2048, 1024), 80), restart_marker_blocks=1)
    assert sum(whole.count(bytes((0xFF, 0xD0 + n))) for n in range(8)) > MAX_SEGMENTS
    decode(whole, 10_000_000)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8\xff\xda\0\2" + b"\xff\0" * 8_000_000,
        b"\xff\xd8" + b"\xff" * 16_000_000,
        b"\xff\xd8\xff\xda\0\2" + b"\xff\xd0" * 8_000_000,
    ],
    ids=["stuffed", "filled", "restarted"],
)
def test_counting_takes_no_time_itself(data: bytes) -> None:
    started = time.monotonic()
    check_structure(data, "image/jpeg")
    assert time.monotonic() - started < SOON_S


def test_whatever_is_broken_is_left_to_the_decoder() -> None:
    rng = random.Random(3)
    whole: list[Any] = [(data, Image.MIME[kind(data)]) for data in files().values()]
    whole += [(tiff(striped(9)), "image/tiff"), (tiff(striped(9), big=True), "image/tiff")]
    for data, content_type in whole:
        for _ in range(200):
            broken = bytearray(data[: rng.randrange(len(data) + 1)])
            for _ in range(rng.randrange(4)):
                if broken:
                    broken[rng.randrange(len(broken))] = rng.randrange(256)
            try:
                check_structure(bytes(broken), content_type)
            except TooComplexError:
                assert content_type == "image/tiff"  # a count that was hit


def kind(data: bytes) -> str:
    with Image.open(io.BytesIO(data)) as image:
        return str(image.format)
