"""Pictures that cost next to nothing to make, so that making them does not disturb what is measured.

One JPEG is encoded for each size. Every picture of that size is the same file but for its head: a comment
with its number, and a few entries of the quantization table, so that its bytes *and* its pixels are its own
(servers tell pictures apart by either). The head's length is a multiple of three, so the base64 form is a
short head of its own before a long tail that all share.
"""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass

from PIL import Image

from epd_bench.workloads import Picture

_APP0_END = 20
"""Bytes of a JFIF file up to the end of its first segment."""

_QUALITY = 85
_CELL = 8
"""Pixels along the edge of what has one random colour: a photograph's size in bytes, roughly."""

_VARIED = 8
"""Low frequencies of the quantization table that differ, each by 0 to 7."""

URI_HEAD = b"data:image/jpeg;base64,"


@dataclass(frozen=True, slots=True)
class _Mould:
    """A JPEG in pieces: what stands before the comment, up to the end of the first table, and the rest."""

    begin: bytes
    table: bytes
    rest: bytes
    rest_base64: bytes


class PictureMaker:
    """Makes the pictures of one run.

    Args:
        seed: Pictures of other seeds have other bytes.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._moulds: dict[tuple[int, int], _Mould] = {}

    def prepare(self, sizes: set[tuple[int, int]]) -> None:
        """Encode what pictures of these sizes share, which takes milliseconds each."""
        for size in sizes:
            self._mould(size)

    def data(self, picture: Picture) -> bytes:
        """The file's bytes."""
        return self._head(picture) + self._mould((picture.width, picture.height)).rest

    def uri(self, picture: Picture) -> tuple[bytes, bytes]:
        """The data URI in two pieces, of which the long one is shared."""
        mould = self._mould((picture.width, picture.height))
        return URI_HEAD + base64.b64encode(self._head(picture)), mould.rest_base64

    def _head(self, picture: Picture) -> bytes:
        mould = self._mould((picture.width, picture.height))
        comment = f"epd-bench {self._seed} {picture.number}".encode()
        length = len(mould.begin) + 4 + len(comment) + len(mould.table)
        comment += b" " * (-length % 3)
        segment = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment
        table = bytearray(mould.table)
        variant = picture.number + 7919 * self._seed
        for place in range(
            6, 6 + _VARIED
        ):  # behind marker, length, table's number and its DC entry
            table[place] = min(255, table[place] + variant % 8)
            variant //= 8
        return mould.begin + segment + bytes(table)

    def _mould(self, size: tuple[int, int]) -> _Mould:
        if size not in self._moulds:
            self._moulds[size] = _make_mould(*size)
        return self._moulds[size]


def _make_mould(width: int, height: int) -> _Mould:
    cells = (-(-width // _CELL), -(-height // _CELL))
    noise = random.Random(f"{width}x{height}").randbytes(cells[0] * cells[1] * 3)
    image = Image.frombytes("RGB", cells, noise).resize((width, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=_QUALITY)
    raw = buffer.getvalue()
    table_end = _APP0_END + 2 + int.from_bytes(raw[_APP0_END + 2 : _APP0_END + 4], "big")
    rest = raw[table_end:]
    return _Mould(raw[:_APP0_END], raw[_APP0_END:table_end], rest, base64.b64encode(rest))
