"""Files that are small and take long: what their parts may be in number.

Decoders walk over some of these in Python, and over all pixels for each scan of a JPEG. The numbers are far
above those of real files. Nothing is said here of whether a file is right, which the decoder finds out; a
walk ends with the first thing that it does not understand, where the decoder's would.
"""

from __future__ import annotations

import re
import struct

MAX_SCANS = 100
"""Of a JPEG. Progressive ones have about 10."""

MAX_SEGMENTS = 10_000
"""Of a JPEG, beside its scans. Colour profiles take up to 255, and descriptions a few hundred."""

MAX_CHUNKS = 65_536
"""Of a PNG. The usual ones of 8 KiB make 4,096 in 32 MiB."""

MAX_TAGS = 4096
"""Of a TIFF's directory; also of EXIF data, which are one."""

MAX_VALUES = 200_000
"""Of one tag there. Tables of 16-bit colours have 196,608; strips are as many as rows, at most."""

_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff]")
_ALONE = frozenset((0x01, *range(0xD0, 0xD9)))
"""Markers without a length: restarts, the start, and one that is never used."""
_SOS, _EOI = 0xDA, 0xD9
_IN_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")

_NUMBERS = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""Types of a tag's values that are read one by one, as texts and bytes are not; bytes of each."""


class TooComplexError(Exception):
    """There are too many parts; the text says of what there may be how many."""


def check_structure(data: bytes, content_type: str) -> None:
    """Count the parts of a picture, in milliseconds.

    Raises:
        TooComplexError: there are too many.
    """
    match content_type:
        case "image/jpeg":
            _check_jpeg(data)
        case "image/png":
            _check_png(data)
        case "image/tiff":
            check_directory(data)


def check_directory(data: bytes) -> None:
    """Count the parts of the first directory of a TIFF, or of EXIF data.

    Raises:
        TooComplexError: there are too many.
    """
    order = "<" if data[:2] == b"II" else ">"
    # BigTIFF has larger numbers everywhere.
    big = data[2:4] in (b"\x2b\0", b"\0\x2b")
    first, number, tag = ("Q", "Q", "HHQQ") if big else ("L", "H", "HHLL")
    try:
        (at,) = struct.unpack_from(order + first, data, 8 if big else 4)
        (tags,) = struct.unpack_from(order + number, data, at)
        at += struct.calcsize(order + number)
        size = struct.calcsize(order + tag)
        for n in range(min(tags, MAX_TAGS + 1)):
            _, kind, count, where = struct.unpack_from(order + tag, data, at + n * size)
            if n == MAX_TAGS:
                raise _too_many("tags", MAX_TAGS)
            # What is not in the file is not read.
            if count > MAX_VALUES and where + count * _NUMBERS.get(kind, len(data)) <= len(data):
                raise _too_many("values in one tag", MAX_VALUES)
    except (struct.error, OverflowError):
        return


def _check_jpeg(data: bytes) -> None:
    scans = segments = 0
    at, pattern = 2, _JPEG_MARKER
    while (found := pattern.search(data, at)) is not None:
        marker, at = data[found.end() - 1], found.end()
        if marker == _EOI:
            return
        if marker in _ALONE:
            segments += 1
        else:
            length = int.from_bytes(data[at : at + 2], "big")
            at += max(length, 2)
            if marker == _SOS:
                scans += 1
            else:
                segments += 1
        pattern = _IN_SCAN if marker == _SOS else _JPEG_MARKER
        if scans > MAX_SCANS:
            raise _too_many("scans", MAX_SCANS)
        if segments > MAX_SEGMENTS:
            raise _too_many("segments", MAX_SEGMENTS)


def _check_png(data: bytes) -> None:
    at = 8
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data) or data[at + 4 : at + 8] == b"IEND":
            return
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    raise _too_many("chunks", MAX_CHUNKS)


def _too_many(what: str, most: int) -> TooComplexError:
    return TooComplexError(f"more than {most} {what}")
