"""How many jobs a worker takes ahead of its engine. Pure policy.

What a worker has in its hands no other one gets, and nothing more urgent goes before it. So a worker takes
no more than it will be done with soon, by the rate at which its jobs end: a slow one has few, a fast one
many; one at least.
"""

from __future__ import annotations

import bisect
import math
from collections import deque

LEAST = 1
_ENDS = 32
"""The rate is that of so many ends."""

_LOADS = (1, 2, 3, 4, 6, 9, 13, 20, 30)
"""Jobs in work from which on a worker counts as more loaded; NATS has ten levels."""


def load_level(busy: int) -> int:
    """How loaded a worker with so many jobs in work is, from 0 to 9."""
    return bisect.bisect_right(_LOADS, busy)


class WorkAhead:
    """One worker's jobs.

    Args:
        ahead_s: Seconds of work that it takes, at most; 0 for as much as there are slots.
        slots: Jobs it takes in any case at most.
    """

    def __init__(self, ahead_s: float, slots: int) -> None:
        self._ahead_s = ahead_s
        self._slots = slots
        self._busy = 0
        self._since = 0.0
        self._gaps_s: deque[float] = deque(maxlen=_ENDS)

    @property
    def busy(self) -> int:
        """Jobs in work."""
        return self._busy

    def began(self, now: float) -> None:
        """A job is in work."""
        if not self._busy:
            self._since = now
        self._busy += 1

    def ended(self, now: float) -> None:
        """One is no more."""
        self._busy -= 1
        # Ends of a batch come together: the first took the time, and the mean is right.
        self._gaps_s.append(now - self._since)
        self._since = now

    @property
    def most(self) -> int:
        """Jobs that may be in work now."""
        if not self._ahead_s or not self._gaps_s:
            return self._slots
        gap_s = sum(self._gaps_s) / len(self._gaps_s)
        if gap_s * self._slots <= self._ahead_s:
            return self._slots
        return min(self._slots, max(LEAST, math.ceil(self._ahead_s / gap_s)))
