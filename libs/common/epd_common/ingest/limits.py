"""What one request's media may cost."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields

from epd_common.errors import TooLargeError
from epd_common.protocol.jobs import MAX_INLINE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestLimits:
    """Bounds of ingest; every one of them is positive.

    Attributes:
        max_media_bytes: Bytes of one media part.
        max_pixels: Width x height of one picture, as its header tells.
        max_items: Media parts of one request, equal ones counted each.
        max_inline_bytes: Inline bytes of one direct job, all items together (invariant I8).
        concurrent_loads: Parts of one request that are fetched and checked at the same time, which
            bounds the bytes a request holds in memory to so many times ``max_media_bytes``.
        decode_workers: Processes that decode. Each may hold one picture of ``max_pixels``.
        decode_queue: Pictures that wait for a process before further ones are answered 429; of one tenant
            half as many. As many as 64 requests load at once.
        decode_timeout_s: Seconds that one decode may take by the clock, at most; what it may take of a
            processor goes by bytes and pixels.
    """

    max_media_bytes: int = 32 * 1024 * 1024
    max_pixels: int = 100_000_000
    max_items: int = 64
    max_inline_bytes: int = MAX_INLINE_BYTES
    concurrent_loads: int = 8
    decode_workers: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))
    decode_queue: int = 512
    decode_timeout_s: float = 20.0

    @property
    def decode_memory_bytes(self) -> int:
        """What a process that decodes may take beside its program: the file twice, and 16 bytes a pixel.

        WebP needs so much (four pictures of four bytes a pixel), a progressive JPEG of four colours 12.
        """
        return (64 << 20) + 2 * self.max_media_bytes + 16 * self.max_pixels

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value <= 0:
                raise ValueError(f"{entry.name} must be above 0, not {value!r}")


def media_too_large(place: str, max_bytes: int, size: int | None = None) -> TooLargeError:
    """The error for a part above ``max_media_bytes``; ``size`` is left out where it is not known."""
    found = f"{size} bytes" if size is not None else "too many bytes"
    return TooLargeError(
        f"the media at {place} has {found}; at most {max_bytes} are allowed",
        code="media_too_large",
        param=place,
        stage="ingest",
    )
