"""In which order a worker asks its lanes for a job. Pure policy.

All lanes together are meant to be one queue, in the order of when each job was published plus what its lane
waits. But a worker cannot see what a lane holds without taking it. What it knows is that nothing in a lane
is older than the last job that came out of it, and that nothing was in it when it was found empty. So it
asks first where the most urgent job *may* be, and learns by asking: at worst, one job comes too early each
time that a lane's wait is over.
"""

from __future__ import annotations

from collections.abc import Sequence


class LaneOrder:
    """The order of one worker's lanes.

    Args:
        waits_s: How much longer a job of each lane may wait than one of a lane without wait. With infinity
            it waits as long as there are others; where all waits are equal, the oldest job comes first.
    """

    def __init__(self, waits_s: Sequence[float]) -> None:
        self._waits_s = waits_s
        self._since = [0.0] * len(waits_s)
        self._lead_s: float | None = None

    def order(self) -> list[int]:
        """Numbers of the lanes, the most urgent first."""
        return sorted(range(len(self._waits_s)), key=lambda lane: (self._urgency(lane), lane))

    def took(self, lane: int, *, published: float, now: float) -> None:
        """A job came out of a lane.

        Args:
            published: By the broker's clock, in seconds.
            now: By this process's monotonic clock.
        """
        if self._lead_s is None:
            # Before that there was nothing to compare times of lanes with.
            self._since = [published] * len(self._waits_s)
            self._lead_s = published - now
        self._lead_s = max(self._lead_s, published - now)
        self._note(lane, published)

    def found_empty(self, lane: int, *, now: float) -> None:
        """A lane had no job."""
        if self._lead_s is not None:
            self._note(lane, now + self._lead_s)

    def _note(self, lane: int, at: float) -> None:
        self._since[lane] = max(self._since[lane], at)

    def _urgency(self, lane: int) -> float:
        return self._since[lane] + self._waits_s[lane]
