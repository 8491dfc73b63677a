"""Pictures that cost a decoder all it may take, and are not tried again for a while."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

KEPT_S = 300.0
"""Seconds that a picture is remembered for."""

MAX_KEPT = 4096
"""Pictures; the oldest is forgotten first."""


class Hopeless:
    """Remembers why pictures failed, each by its digest and its tenant: another tenant's are none of theirs.

    Args:
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], tuple[float, type[Exception]]] = OrderedDict()

    def add(self, owner: str, digest: str, fault: type[Exception]) -> None:
        """Remember a failure by its kind."""
        self._kept[owner, digest] = (self._clock() + KEPT_S, fault)
        self._kept.move_to_end((owner, digest))
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def find(self, owner: str, digest: str) -> type[Exception] | None:
        """Why this picture failed not long ago, if it did."""
        until, fault = self._kept.get((owner, digest), (0.0, None))
        if fault is not None and until <= self._clock():
            del self._kept[owner, digest]
            return None
        return fault
