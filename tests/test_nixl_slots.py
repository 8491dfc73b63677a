"""Who lies where in a region: leases, quarantine, eviction, with no memory and a clock of the test's own."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from epd_common.store.nixl.slots import ALIGN_BYTES, MOST_LEASES, Slot, Slots

LEASE_S = 5.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def slots(pages: int) -> tuple[Slots, Clock, Counter[str]]:
    clock, counters = Clock(), Counter[str]()
    made = Slots(pages * ALIGN_BYTES, lease_s=LEASE_S, counters=counters, clock=clock)
    return made, clock, counters


def put(kept: Slots, key: str, pages: int = 1) -> Slot | None:
    slot = kept.take(key, pages * ALIGN_BYTES)
    if slot is not None:
        kept.publish(slot)
    return slot


def test_the_least_recently_used_go_first() -> None:
    kept, _, counters = slots(3)
    for key in "abc":
        put(kept, key)
    assert kept.find("a")
    assert put(kept, "d")
    assert [bool(kept.find(key)) for key in "abcd"] == [True, False, True, True]
    assert counters["nixl_evicted"] == 1


def test_what_is_read_is_not_evicted() -> None:
    kept, _, _ = slots(2)
    first = put(kept, "a")
    assert first is not None
    put(kept, "b")
    kept.lease(first.generation, "r")
    assert put(kept, "c") and kept.find("a") and not kept.find("b")
    assert kept.leased == 1
    kept.release(first.generation, "r")
    kept.find("c")
    assert put(kept, "d") and not kept.find("a")


def test_a_lease_ends_by_time_and_only_of_who_asked() -> None:
    kept, clock, _ = slots(1)
    slot = put(kept, "a")
    assert slot is not None
    kept.lease(slot.generation, "r1")
    kept.lease(slot.generation, "r2")
    kept.release(slot.generation, "r1")
    assert put(kept, "b") is None
    clock.now += LEASE_S - 0.1
    assert put(kept, "b") is None
    clock.now += 0.1
    assert put(kept, "b")


def test_forgotten_while_read_it_is_not_written_over() -> None:
    kept, _, _ = slots(1)
    slot = put(kept, "a")
    assert slot is not None
    kept.lease(slot.generation, "r")
    kept.forget("a")
    assert kept.find("a") is None and kept.used_bytes == 0
    assert kept.quarantined == 1
    assert put(kept, "b") is None
    kept.release(slot.generation, "r")
    assert kept.quarantined == 0
    again = put(kept, "b")
    assert again is not None and again.generation != slot.generation
    kept.lease(slot.generation, "late")  # it has nothing to do with what lies there now
    assert kept.leased == 0


def test_put_again_replaces_and_dropped_is_free() -> None:
    kept, _, _ = slots(4)
    first = put(kept, "a", 2)
    second = kept.take("a", 2 * ALIGN_BYTES)
    assert first is not None and second is not None and first.offset != second.offset
    kept.publish(second)
    assert kept.find("a") is second and kept.used_bytes == 2 * ALIGN_BYTES
    other = kept.take("b", 2 * ALIGN_BYTES)
    assert other is not None
    kept.drop(other)
    assert put(kept, "c", 2) and kept.find("a")


def test_leases_of_one_slot_are_bounded() -> None:
    kept, _, _ = slots(1)
    slot = put(kept, "a")
    assert slot is not None
    for number in range(2 * MOST_LEASES):
        kept.lease(slot.generation, f"r{number}")
    assert len(slot.leases) == MOST_LEASES


def test_slots_never_overlap_and_no_room_is_lost() -> None:
    """Random puts, reads and deletes; at the end all of it is free again, in one piece."""
    rng = random.Random(7)
    kept, clock, _ = slots(64)
    written: list[Slot] = []
    for step in range(3000):
        clock.now += rng.random()
        key = f"k{rng.randrange(40)}"
        if rng.random() < 0.6:
            slot = kept.take(key, rng.randrange(1, 20 * ALIGN_BYTES))
            if slot is not None and rng.random() < 0.1:
                kept.drop(slot)
            elif slot is not None:
                kept.publish(slot)
        elif (found := kept.find(key)) is not None:
            action = rng.choice((kept.lease, kept.release))
            action(found.generation, f"r{step % 5}")
            if rng.random() < 0.3:
                kept.forget(key)
        written = list(kept._generations.values())
        spans = sorted((each.offset, each.offset + each.room) for each in written)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert (
            sum(size for _, size in kept._holes) + sum(each.room for each in written) == kept.size
        )
    clock.now += LEASE_S
    for key in list(kept._kept):
        kept.forget(key)
    assert kept.quarantined == 0
    assert kept._holes == [(0, kept.size)]
