"""Who lies where in a region: slots, leases, quarantine, eviction. Pure policy; it knows no memory.

An embedding has a slot while it is kept. A reader leases the slot while it reads: a leased one is not
evicted. What is forgotten while somebody reads it goes into quarantine: its memory is used for nothing else
before the last lease has ended. A lease ends by the reader's word or by time, as readers die.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

ALIGN_BYTES = 4096
MOST_LEASES = 256
"""Of one slot; who asks for more reads without."""


@dataclass(slots=True, eq=False)
class Slot:
    """A part of the region. ``generation`` names it once and for all; ``room`` is ``size`` rounded up."""

    key: str
    generation: int
    offset: int
    size: int
    room: int
    leases: dict[str, float] = field(default_factory=dict)

    def leased(self, now: float) -> bool:
        """Whether somebody reads it, as far as is known."""
        for reader in [reader for reader, until in self.leases.items() if until <= now]:
            del self.leases[reader]
        return bool(self.leases)


class Slots:
    """The slots of one region.

    Args:
        size: Of the region, in bytes.
        lease_s: A lease ends by itself after so long.
        counters: ``nixl_evicted``.
    """

    def __init__(
        self,
        size: int,
        *,
        lease_s: float,
        counters: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = size
        self._lease_s = lease_s
        self._clock = clock
        self._numbers = itertools.count(1)
        self._holes: list[tuple[int, int]] = [
            (0, size)
        ]  # offset and bytes, in order, never adjacent
        self._kept: OrderedDict[str, Slot] = OrderedDict()  # least recently used first
        self._generations: dict[int, Slot] = {}
        self._quarantine: list[Slot] = []
        self._counters = counters

    @property
    def used_bytes(self) -> int:
        return sum(slot.size for slot in self._kept.values())

    @property
    def leased(self) -> int:
        """Slots that somebody reads."""
        now = self._clock()
        return sum(slot.leased(now) for slot in self._kept.values())

    @property
    def quarantined(self) -> int:
        """Slots that were forgotten while somebody read them."""
        self._end_quarantine()
        return len(self._quarantine)

    def find(self, key: str) -> Slot | None:
        """Where an embedding lies; it counts as used."""
        if (slot := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return slot

    def take(self, key: str, size: int) -> Slot | None:
        """A slot to be written, then published or dropped. Evicts what nobody reads, least recently used
        first; None: what is being read and written leaves no room now."""
        room = -(-size // ALIGN_BYTES) * ALIGN_BYTES
        self._end_quarantine()
        while (offset := self._hole(room)) is None:
            if not self._evict():
                return None
        slot = Slot(key, next(self._numbers), offset, size, room)
        self._generations[slot.generation] = slot
        return slot

    def publish(self, slot: Slot) -> None:
        """It is written; what was there under its key is forgotten."""
        self.forget(slot.key)
        self._kept[slot.key] = slot

    def drop(self, slot: Slot) -> None:
        """A slot that was taken and not published is of no use."""
        self._free(slot)

    def forget(self, key: str) -> Slot | None:
        """No longer keep it; the slot that it had."""
        slot = self._kept.pop(key, None)
        if slot is not None:
            if slot.leased(self._clock()):
                self._quarantine.append(slot)
            else:
                self._free(slot)
        return slot

    def lease(self, generation: int, reader: str) -> None:
        """Somebody reads a slot. One that is gone meanwhile cannot be leased: the reader will see it."""
        slot = self._generations.get(generation)
        if slot is not None and (reader in slot.leases or len(slot.leases) < MOST_LEASES):
            slot.leases[reader] = self._clock() + self._lease_s
            if self._kept.get(slot.key) is slot:
                self._kept.move_to_end(slot.key)

    def release(self, generation: int, reader: str) -> None:
        """It has read it."""
        if (slot := self._generations.get(generation)) is not None:
            slot.leases.pop(reader, None)

    def _evict(self) -> bool:
        now = self._clock()
        for key, slot in self._kept.items():
            if not slot.leased(now):
                del self._kept[key]
                self._free(slot)
                self._counters["nixl_evicted"] += 1
                return True
        return False

    def _end_quarantine(self) -> None:
        now = self._clock()
        ended = [slot for slot in self._quarantine if not slot.leased(now)]
        for slot in ended:
            self._quarantine.remove(slot)
            self._free(slot)

    def _hole(self, room: int) -> int | None:
        """Cut the room out of the first hole that has it."""
        for index, (offset, size) in enumerate(self._holes):
            if size >= room:
                rest = [(offset + room, size - room)] if size > room else []
                self._holes[index : index + 1] = rest
                return offset
        return None

    def _free(self, slot: Slot) -> None:
        del self._generations[slot.generation]
        holes = sorted([*self._holes, (slot.offset, slot.room)])
        joined = holes[:1]
        for offset, size in holes[1:]:
            before, length = joined[-1]
            if before + length == offset:
                joined[-1] = (before, length + size)
            else:
                joined.append((offset, size))
        self._holes = joined
