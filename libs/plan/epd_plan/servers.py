"""Servers that take one piece of work after another, in the order in which it comes.

The end of each piece is known when it comes, so that none of them needs an event of its own.
"""

from __future__ import annotations

import heapq


class Servers:
    """Some that are alike: cores, processes, a link.

    Args:
        count: 1 or more.
    """

    def __init__(self, count: int) -> None:
        self._free_at = [0.0] * count
        self.busy_s = 0.0
        """Seconds of work that all of them took."""

    def serve(self, now: float, seconds: float) -> float:
        """When a piece of work is done that comes now; it is begun as soon as one is free."""
        begins = max(now, self._free_at[0])
        heapq.heapreplace(self._free_at, begins + seconds)
        self.busy_s += seconds
        return begins + seconds
