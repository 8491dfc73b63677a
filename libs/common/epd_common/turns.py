"""Which items go into an encoder's tower together, and in which order. Pure policy.

A tower encodes what it is given as one batch, and nobody has any of it before all of it is done. Large
pictures gain little by that, and the first of a request are wanted long before the last: their prefill can
begin. So an encoder gives its tower half of what waits at a time, the oldest first: three pictures one after
the other, twenty as ten, five, two, and so on. The more there are, the more there is to gain from batches.

Two groups are in the tower at once, one that is encoded and one behind it, so that it is never idle. Items
come out of their lanes, and of their preparation (fetch, decode, processor), in any order; one that is ready
earlier than an older one lets that go first, as long as it has not been prepared for long.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

GROUPS = 2
HOLD_S = 0.1
"""Seconds from an item's arrival for which younger ones let it go first."""


class Place(NamedTuple):
    """Of an item: the lower one goes first."""

    sequence: int
    number: int


class Turns:
    """The items of one encoder. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._latest = 0
        self._preparing: dict[Place, float] = {}
        self._ready: set[Place] = set()
        self._groups: list[set[Place]] = []

    def arrive(self, now: float, *, sequence: int | None = None) -> Place:
        """An item has come, and is going to be prepared; its place among all.

        Args:
            sequence: Of its job in the queue, by which items are older or younger; one that was in no queue
                is as old as the last one that was.
        """
        if sequence is not None:
            self._latest = max(self._latest, sequence)
        place = Place(self._latest if sequence is None else sequence, next(self._numbers))
        self._preparing[place] = now
        return place

    def ready(self, place: Place) -> None:
        """It is prepared."""
        if self._preparing.pop(place, None) is not None:
            self._ready.add(place)

    def leave(self, place: Place) -> None:
        """It is encoded, or will not be."""
        self._preparing.pop(place, None)
        self._ready.discard(place)
        for group in self._groups:
            group.discard(place)
        self._groups = [group for group in self._groups if group]

    def let_in(self, now: float) -> list[Place]:
        """Those that go into the tower now. Ask again after each change, and at :meth:`again_at`."""
        found: list[Place] = []
        while len(self._groups) < GROUPS and (group := self._next_group(now)):
            self._groups.append(set(group))
            self._ready -= set(group)
            found += group
        return found

    def again_at(self, now: float) -> float | None:
        """When somebody who is held back now may go in; None: not by time alone."""
        if len(self._groups) == GROUPS or not self._ready:
            return None
        arrived = self._held_for(now).values()
        return min(arrived) + HOLD_S if arrived else None

    def _next_group(self, now: float) -> list[Place]:
        first_held_for = min(self._held_for(now), default=None)
        order = sorted(self._ready)
        if first_held_for is not None:
            order = [place for place in order if place < first_held_for]
        return order[: max(1, len(order) // 2)]

    def _held_for(self, now: float) -> dict[Place, float]:
        """Items for which younger ones wait, and when they came."""
        return {
            place: arrived for place, arrived in self._preparing.items() if now - arrived < HOLD_S
        }
