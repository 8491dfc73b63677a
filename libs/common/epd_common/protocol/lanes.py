"""Which lane a job takes: by the work that stands before it in its own request, and by its priority.

Pure policy. Queues with heavy-tailed requests stay fair when one request's twenty-fifth picture never
stands before another request's first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_BOUNDS = (2, 6, 14)
"""Positions below these go to lanes 0, 1 and 2; the rest to lane 3."""

AGED_WAITS_S = (0.5, 1.5, 3.0)
"""So much longer than in lane 0 a job waits in lanes 1, 2 and 3, at most."""

BACKGROUND_LANE = "l4"
"""For what others go before, however long it waits: low priority, a tenant beyond its share, the encode of an
upload."""

BACKGROUND_SHARE = 0.75
"""Of a PD worker's slots; generate jobs of the background lane never get the rest, so that others find a free
one however long those take."""

URGENT_LANE = "l0"


def lane_waits_s(aged: Sequence[float]) -> tuple[float, ...]:
    """What each lane waits, in the order of ``LANES``, given that of lanes 1, 2 and 3."""
    return (0.0, *aged, math.inf)


def background_slots(slots: int) -> int:
    """Of so many slots those that jobs of the background lane may have, 1 or more."""
    return max(1, int(slots * BACKGROUND_SHARE))


def _lane(ahead: int, priority: int) -> str:
    """Urgent jobs (below 0) come first whatever their size, and those that can wait (above 0) last."""
    if priority < 0:
        return URGENT_LANE
    if priority > 0:
        return BACKGROUND_LANE
    return f"l{sum(ahead >= bound for bound in _BOUNDS)}"


def encode_lane(position: int, priority: int = 0) -> str:
    """Lane of the encode job for the item at ``position`` (from 0) in its request."""
    return _lane(position, priority)


def generate_lane(items: int, priority: int = 0) -> str:
    """Lane of a generate job with so many distinct items."""
    return _lane(max(0, items - 1), priority)
