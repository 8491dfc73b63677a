"""One embedding as bytes: a header of fixed size, then the rows.

The same layout lies in an arena's file and travels through Redis, so a reader on either side can tell
a wrong, foreign, truncated or damaged embedding before an engine sees it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from epd_common.errors import EpdError

MAGIC = b"EPDE2\n"
HEADER_BYTES = 4096
"""Bytes before the payload; a page, so that the payload of a mapped file is aligned."""

_PREFIX = struct.Struct(f"<{len(MAGIC)}sH8s")
"""Magic, size of the header's body, and the body's xxh3-64: the payload's checksum does not cover it."""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class IntegrityError(EpdError):
    """Bytes that are not the embedding they should be."""

    status = 502
    default_code = "embedding_invalid"


class EmbeddingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an embedding: ``rows`` x ``width`` values of ``dtype``.

    ``metadata`` is what a PD worker needs in place of pixels (e.g. ``image_grid_thw``); ``checksum`` is the
    xxh3-128 of the payload in hex, empty in a file that is not sealed yet.
    """

    key: str
    rows: int
    width: int
    dtype: str
    fingerprint: str = ""
    metadata: dict[str, Any] = {}
    checksum: str = ""

    @property
    def payload_bytes(self) -> int:
        return self.rows * self.width * DTYPE_BYTES[self.dtype]

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes


def pack_header(header: EmbeddingHeader) -> bytes:
    """The header as exactly ``HEADER_BYTES`` bytes."""
    body = msgspec.msgpack.encode(header)
    if _PREFIX.size + len(body) > HEADER_BYTES:
        raise IntegrityError(
            f"the metadata of embedding {header.key} takes {len(body)} bytes, "
            f"a header holds {HEADER_BYTES - _PREFIX.size}"
        )
    prefix = _PREFIX.pack(MAGIC, len(body), xxhash.xxh3_64_digest(body))
    return (prefix + body).ljust(HEADER_BYTES, b"\0")


def unpack_header(data: bytes | memoryview) -> EmbeddingHeader:
    """Read a header.

    Raises:
        IntegrityError: not a header of ours, or one that cannot be true.
    """
    if len(data) < HEADER_BYTES:
        raise IntegrityError(f"an embedding's header has {HEADER_BYTES} bytes, got {len(data)}")
    magic, size, right = _PREFIX.unpack_from(data)
    if magic != MAGIC or _PREFIX.size + size > HEADER_BYTES:
        raise IntegrityError("these bytes do not begin like an embedding of this version")
    body = data[_PREFIX.size : _PREFIX.size + size]
    if xxhash.xxh3_64_digest(body) != right:
        raise IntegrityError("an embedding's header does not match its checksum")
    try:
        header = msgspec.msgpack.decode(body, type=EmbeddingHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IntegrityError(f"an embedding's header is damaged: {error}") from error
    if header.dtype not in DTYPE_BYTES or header.rows < 1 or header.width < 1:
        raise IntegrityError(
            f"an embedding cannot have {header.rows} x {header.width} values of {header.dtype}"
        )
    return header


def payload_checksum(payload: bytes | memoryview) -> str:
    """xxh3-128 in hex: fast enough to be computed for every embedding, at both ends."""
    return xxhash.xxh3_128_hexdigest(payload)


class RunningChecksum:
    """The same of a payload that comes part by part."""

    def __init__(self) -> None:
        self._sum = xxhash.xxh3_128()

    def update(self, part: memoryview) -> None:
        """One part more."""
        self._sum.update(part)

    def hex(self) -> str:
        """Of all parts so far."""
        return str(self._sum.hexdigest())


@dataclass(frozen=True, slots=True)
class Embedding:
    """A header and its payload, which may be a view of a mapped file."""

    header: EmbeddingHeader
    payload: memoryview

    def verify(self) -> None:
        """Check size and checksum.

        Raises:
            IntegrityError: naming what differs.
        """
        header = self.header
        if self.payload.nbytes != header.payload_bytes:
            raise IntegrityError(
                f"embedding {header.key} has {self.payload.nbytes} payload bytes, "
                f"its header says {header.payload_bytes}",
                key=header.key,
            )
        if payload_checksum(self.payload) != header.checksum:
            raise IntegrityError(
                f"embedding {header.key} does not match its checksum", key=header.key
            )
