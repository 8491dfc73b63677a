"""What a simulated engine does wrong, and when: counted, so that each run goes alike."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass

logger = logging.getLogger(__name__)

CRASH_EXIT = 70
"""Exit code of a process that was told to crash."""


class EngineDiedError(Exception):
    """The engine cannot work any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Which of an engine's works go wrong; a work is an item that is encoded, or a step. 0 is never.

    Attributes:
        crash_at: The process ends at this work, without a word.
        die_at: The engine dies at this work; its process lives.
        hang_at: This work and all later ones never end.
        slow_factor: All works take so many times as long.
        nan_every: Each so manieth encode gives values that are no numbers.
        wrong_rows_every: Each so manieth encode gives a row too many.
    """

    crash_at: int = 0
    die_at: int = 0
    hang_at: int = 0
    slow_factor: float = 1.0
    nan_every: int = 0
    wrong_rows_every: int = 0


class Faults:
    """Counts the works of one kind of one engine, and fails as planned."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self.count = 0

    async def begin(self) -> None:
        """One more work begins.

        Raises:
            EngineDiedError: as planned.
        """
        self.count += 1
        plan = self._plan
        if self.count == plan.crash_at:
            logger.error("crashing at work %d, as planned", self.count)
            os._exit(CRASH_EXIT)
        if self.count == plan.die_at:
            raise EngineDiedError(f"died at work {self.count}, as planned")
        if plan.hang_at and self.count >= plan.hang_at:
            logger.warning("hanging from work %d on, as planned", self.count)
            await asyncio.Event().wait()

    def gives_nan(self, number: int) -> bool:
        """Whether encode ``number``, counted from 1, does."""
        return _each(self._plan.nan_every, number)

    def gives_wrong_rows(self, number: int) -> bool:
        return _each(self._plan.wrong_rows_every, number)


def _each(every: int, number: int) -> bool:
    return every > 0 and number % every == 0
