"""Simulated time: what is due, in its order.

Plain callbacks instead of a library's processes: a request is a dozen events, and each costs a microsecond.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class Event:
    """Something that is due."""

    __slots__ = ("_action", "_arguments")

    def __init__(self, action: Action, arguments: tuple[Any, ...]) -> None:
        self._action: Action | None = action
        self._arguments = arguments

    def cancel(self) -> None:
        """It does not happen."""
        self._action = None

    def happen(self) -> None:
        if self._action is not None:
            self._action(*self._arguments)


class Events:
    """What is due. Events of the same time happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds from the beginning."""
        self._due: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()
        self._stopped = False

    def at(self, time: float, action: Action, *arguments: Any) -> Event:
        """Plan something for a time, in seconds.

        Raises:
            ValueError: that time is over.
        """
        if not time >= self.now:
            raise ValueError(f"{time} is before {self.now}, which is now")
        event = Event(action, arguments)
        heapq.heappush(self._due, (time, next(self._numbers), event))
        return event

    def after(self, seconds: float, action: Action, *arguments: Any) -> Event:
        """Plan something for so many seconds from now.

        Raises:
            ValueError: they are negative.
        """
        return self.at(self.now + seconds, action, *arguments)

    def stop(self) -> None:
        """What is due does not happen any more."""
        self._stopped = True

    def run(self) -> None:
        """Let time pass until nothing is due, or until it is stopped."""
        while self._due and not self._stopped:
            self.now, _, event = heapq.heappop(self._due)
            event.happen()
