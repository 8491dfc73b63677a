"""What can be seen of a server beside its answers, where it is ours or runs on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from epd_bench.processes import since


class Reading(msgspec.Struct, kw_only=True):
    """Counts since the start of the server.

    Attributes:
        cpu_s: CPU seconds by role.
        counts: Of the stages, e.g. ``encoded``.
    """

    cpu_s: dict[str, float] = {}
    counts: dict[str, int] = {}


class Observer(Protocol):
    """Looks at a server."""

    async def read(self) -> Reading: ...


class TargetUse(msgspec.Struct, kw_only=True):
    """What a run cost the server.

    Attributes:
        cpu_s: CPU seconds by role.
        cpu_per_request_s: The same for each request that was sent.
        counts: Of the stages, e.g. ``encoded`` (items that an encoder computed), ``embedding_bytes``
            (written by encoders), ``fetched_bytes`` (brought to PD workers from other nodes).
        encodes_per_distinct_image: 1 is each image once, whoever sends it how often.
    """

    cpu_s: dict[str, float]
    cpu_per_request_s: dict[str, float]
    counts: dict[str, int]
    encodes_per_distinct_image: float | None


def use_between(
    before: Reading, after: Reading, *, requests: int, distinct_images: int
) -> TargetUse:
    """What was used between two readings."""
    cpu_s = since(before.cpu_s, after.cpu_s)
    counts = _grown(before.counts, after.counts)
    encoded = counts.get("encoded")
    return TargetUse(
        cpu_s=cpu_s,
        cpu_per_request_s={role: used / max(1, requests) for role, used in cpu_s.items()},
        counts=counts,
        encodes_per_distinct_image=(
            encoded / distinct_images if encoded is not None and distinct_images else None
        ),
    )


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items()}
