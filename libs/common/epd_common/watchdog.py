"""When an engine counts as hung: it owes work and computes nothing. Pure policy, no clock and no I/O.

A busy engine computes, however slowly, so it never looks hung; nor does an idle one, or one whose requests
all wait for embeddings. Time adds up over requests, since each of them ends by its own deadline.
"""

from __future__ import annotations


class Watchdog:
    """Looks at an engine now and then.

    Args:
        bound_s: Seconds without a step after which an engine that owes work is held for hung; 0: never.
        longest_look_s: A look counts for so long at most: when the whole process stood still, the engine may
            have, too, and gets its time again.
    """

    def __init__(self, *, bound_s: float, longest_look_s: float) -> None:
        self._bound_s = bound_s
        self._longest_look_s = longest_look_s
        self._steps = -1
        self._owed_s = 0.0

    def look(self, *, steps: int, owes: bool, since_last_s: float) -> bool:
        """Whether the engine is hung.

        Args:
            steps: What it has computed until now.
            owes: Whether it has something that it could compute.
            since_last_s: Seconds since the last look.
        """
        if steps != self._steps:
            self._steps = steps
            self._owed_s = 0.0
        elif owes:
            self._owed_s += min(since_last_s, self._longest_look_s)
        return 0 < self._bound_s <= self._owed_s
