"""Quantiles of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec


class Quantiles(msgspec.Struct, frozen=True):
    """Of some values, in their unit; all 0 where there are none."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


def quantiles(values: Iterable[float]) -> Quantiles:
    """The nearest-rank quantiles."""
    ordered = sorted(values)
    if not ordered:
        return Quantiles()

    def at(share: float) -> float:
        return ordered[
            min(len(ordered) - 1, max(0, -(-int(share * 100 * len(ordered)) // 100) - 1))
        ]

    return Quantiles(
        len(ordered), statistics.fmean(ordered), at(0.5), at(0.9), at(0.99), ordered[-1]
    )
