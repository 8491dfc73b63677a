"""Ways in which an embedding's file can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from epd_common.store.embedding import HEADER_BYTES, pack_header, unpack_header


def with_header(data: bytes, **changes: Any) -> bytes:
    """The file with other statements in its header, which is whole."""
    header = msgspec.structs.replace(unpack_header(data), **changes)
    return pack_header(header) + data[HEADER_BYTES:]


def _fewer_rows(data: bytes) -> bytes:
    header = unpack_header(data)
    whole = with_header(data, rows=header.rows - 1)
    row_bytes = header.payload_bytes // header.rows
    assert len(whole) > HEADER_BYTES + row_bytes
    return whole[:-row_bytes]


UNFIT: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-100],
    "shorter than its header": lambda data: data[:100],
    "not an embedding": lambda data: b"x" * len(data),
    "fewer rows": _fewer_rows,
    "another width in the header": lambda data: with_header(data, width=7),
    "another dtype in the header": lambda data: with_header(data, dtype="float16"),
    "another model": lambda data: with_header(data, fingerprint="f" * 64),
}
"""By what is wrong; an engine that was given one of them would compute nonsense, or die."""

DAMAGED: dict[str, Callable[[bytes], bytes]] = UNFIT | {
    "a bit of the payload": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "a bit of the header": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
    "another grid": lambda data: with_header(data, metadata={"image_grid_thw": [1, 2, 2]}),
    "another key": lambda data: with_header(data, key="e" * 64),
}
"""And those that only who brings it to the node can see."""
