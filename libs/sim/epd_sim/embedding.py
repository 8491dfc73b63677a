"""Embeddings that say which media they were made from: one signature, repeated over all rows."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from pathlib import Path

from epd_common.engines import Placeholder
from epd_common.store.arena import map_embedding
from epd_common.store.embedding import (
    EmbeddingHeader,
    IntegrityError,
    pack_header,
    payload_checksum,
)
from epd_common.store.room import write_whole
from epd_sim.sizing import rows_of

SIGNATURE_BYTES = 32
DTYPE = "bfloat16"
VALUE_BYTES = 2
NOT_A_NUMBER = b"\xc0\x7f" * (SIGNATURE_BYTES // VALUE_BYTES)
"""A signature of values that are no numbers."""

_numbers = itertools.count()


def signature(data: bytes) -> bytes:
    """What an embedding holds of its media: their SHA-256 with a bit of each exponent cleared, so that all
    16 values are finite as bfloat16."""
    raw = bytearray(hashlib.sha256(data).digest())
    for place in range(1, SIGNATURE_BYTES, VALUE_BYTES):
        raw[place] &= 0xBF
    return bytes(raw)


def write_embedding(folder: Path, header: EmbeddingHeader, repeated: bytes) -> tuple[Path, str]:
    """Write a file of the arena's staging folder; its path, and its payload's checksum.

    Args:
        header: Its ``rows`` x ``width`` values are ``repeated`` again and again.

    Raises:
        IntegrityError: ``not_finite``, as an engine refuses what its model computed.
        ArenaFullError: there is no room for it.
    """
    if not _finite(repeated):
        raise IntegrityError(
            f"the encoder gave values that are not finite for {header.key}",
            code="not_finite",
            key=header.key,
        )
    payload = repeated * (header.payload_bytes // SIGNATURE_BYTES)
    path = folder / f"sim-{next(_numbers)}-{header.key}"
    write_whole(path, pack_header(header), payload, key=header.key)
    return path, payload_checksum(payload)


def read_signature(pins: Path, expected: Placeholder, fingerprint: str) -> bytes:
    """The signature in a pinned embedding, all of which is read and verified.

    Raises:
        IntegrityError: it is not there, not whole, or not the one that the prompt has room for.
    """
    embedding = map_embedding(pins / expected.key)
    if embedding is None:
        raise IntegrityError(f"embedding {expected.key} is not pinned on this node")
    embedding.verify()
    header = embedding.header
    _check(
        expected.key,
        (
            ("key", header.key, expected.key),
            ("fingerprint", header.fingerprint, fingerprint),
            ("metadata", header.metadata, expected.metadata),
            ("rows", header.rows, rows_of(expected.modality, expected.metadata)),
        ),
    )
    found = bytes(embedding.payload[:SIGNATURE_BYTES])
    if embedding.payload[-SIGNATURE_BYTES:] != found:
        raise IntegrityError(f"embedding {expected.key} begins and ends with different rows")
    return found


def _check(key: str, facts: Iterable[tuple[str, object, object]]) -> None:
    for name, found, right in facts:
        if found != right:
            raise IntegrityError(f"embedding {key} has the {name} {found!r}, not {right!r}")


def _finite(values: bytes) -> bool:
    """Whether bfloat16 values have no exponent of ones alone, little-endian."""
    return not any(
        high & 0x7F == 0x7F and low & 0x80
        for low, high in zip(values[::VALUE_BYTES], values[1::VALUE_BYTES], strict=True)
    )
