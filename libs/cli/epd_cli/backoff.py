"""How long to wait before a process that died is started again. Pure policy."""

from __future__ import annotations

FIRST_S = 1.0
LONGEST_S = 30.0
STEADY_S = 60.0
"""A process that ran for so long had a good start: its next restart is quick again."""


class Backoff:
    """The pauses between the starts of one process: each twice the one before, up to ``LONGEST_S``."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def pause_s(self, ran_s: float) -> float:
        """The pause before the next start, after the process ran for so long."""
        if ran_s >= STEADY_S:
            self._next_s = FIRST_S
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, LONGEST_S)
        return pause_s
