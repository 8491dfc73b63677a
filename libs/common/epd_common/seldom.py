"""Saying once what happens to every request."""

from __future__ import annotations

import math
import time


class Seldom:
    """Tells when to log something again that may happen many times a second.

    Args:
        every_s: Seconds between two times.
    """

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._said = -math.inf

    def now(self) -> bool:
        """Whether to say it now; it counts as said then."""
        now = time.monotonic()
        if now - self._said < self._every_s:
            return False
        self._said = now
        return True
