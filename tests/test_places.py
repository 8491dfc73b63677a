"""Places by tenant: whose turn it is, and that none is lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from epd_common.places import FairPlaces, LineFullError, Turns


def yes() -> bool:
    return True


def admitted(turns: Turns[str]) -> list[str]:
    found = []
    while (waiter := turns.admit()) is not None:
        found.append(waiter)
    return found


def crowd(turns: Turns[str], tenant: str, count: int) -> None:
    for n in range(count):
        turns.join(tenant, f"{tenant}{n}")


def test_one_tenant_never_has_the_last_place() -> None:
    turns: Turns[str] = Turns(4, share=3, line=100, several=yes)
    crowd(turns, "a", 10)
    assert admitted(turns) == ["a0", "a1", "a2"]
    turns.join("b", "b0")
    assert admitted(turns) == ["b0"]
    turns.give_back("b")
    assert admitted(turns) == []
    turns.give_back("a")
    assert admitted(turns) == ["a3"]


def test_tenants_take_turns() -> None:
    turns: Turns[str] = Turns(1, share=1, line=100, several=yes)
    for tenant, count in (("a", 4), ("b", 2), ("c", 1)):
        crowd(turns, tenant, count)
    order = []
    while found := admitted(turns):
        order += found
        turns.give_back(found[0][0])
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    assert turns.waiting == 0


def test_without_tenants_one_has_everything_in_order() -> None:
    turns: Turns[str] = Turns(3, share=1, line=100)
    crowd(turns, "", 5)
    assert admitted(turns) == ["0", "1", "2"]


def test_a_share_of_who_is_alone_ends_when_others_come() -> None:
    several = False
    turns: Turns[str] = Turns(4, share=2, line=100, several=lambda: several)
    crowd(turns, "a", 6)
    assert len(admitted(turns)) == 4
    several = True
    for _ in range(2):
        turns.give_back("a")
        assert admitted(turns) == []
    turns.join("b", "b0")
    assert admitted(turns) == ["b0"]


def test_who_leaves_is_passed_over() -> None:
    turns: Turns[str] = Turns(1, share=1, line=100)
    crowd(turns, "a", 3)
    assert admitted(turns) == ["a0"]
    assert turns.leave("a", "a1")
    assert not turns.leave("a", "a0") and not turns.leave("b", "b0")
    turns.give_back("a")
    assert admitted(turns) == ["a2"]


def test_the_line_has_an_end() -> None:
    turns: Turns[str] = Turns(2, share=1, line=4, several=yes)
    crowd(turns, "a", 1)
    assert admitted(turns) == ["a0"]
    turns.join("a", "x")
    turns.join("a", "y")
    with pytest.raises(LineFullError, match="2"):
        turns.join("a", "z")  # half of the line is for others
    turns.join("b", "b0")
    assert admitted(turns) == ["b0"]
    turns.join("b", "b1")
    turns.join("c", "c0")
    with pytest.raises(LineFullError, match="4"):
        turns.join("d", "d0")
    turns.give_back("b")
    turns.join("d", "d0")  # as it can have that place, if not at once
    assert admitted(turns) == ["b1"]


@pytest.mark.parametrize("seed", range(20))
def test_no_place_is_lost(seed: int) -> None:
    """Whatever comes in whatever order: never more than there are, all used while they may be."""
    rng = random.Random(seed)
    turns: Turns[int] = Turns(5, share=3, line=1000, several=yes)
    waiting: dict[int, str] = {}
    held: dict[int, str] = {}
    for n in range(3000):
        act = rng.random()
        if act < 0.45:
            waiting[n] = rng.choice("aaaabc")
            turns.join(waiting[n], n)
        elif act < 0.55 and waiting:
            leaving = rng.choice(list(waiting))
            assert turns.leave(waiting.pop(leaving), leaving)
        elif held:
            turns.give_back(held.pop(rng.choice(list(held))))
        while (got := turns.admit()) is not None:
            held[got] = waiting.pop(got)
        assert len(held) <= 5 and turns.waiting == len(waiting)
        counts = [list(held.values()).count(tenant) for tenant in "abc"]
        assert max(counts) <= 3
        for count, tenant in zip(counts, "abc", strict=True):
            assert len(held) == 5 or count == 3 or tenant not in waiting.values()


async def test_waiting_ends_with_a_place() -> None:
    places = FairPlaces(2, share=1, line=10, several=yes)
    await places.take("a")
    second = asyncio.ensure_future(places.take("a"))
    await places.take("b")
    assert not second.done()
    places.give_back("b")
    await asyncio.sleep(0)
    assert not second.done()
    places.give_back("a")
    await second


@pytest.mark.parametrize("at_the_same_moment", [False, True])
async def test_who_is_cancelled_keeps_no_place(at_the_same_moment: bool) -> None:
    places = FairPlaces(1, share=1, line=10)
    await places.take("a")
    waiting = asyncio.ensure_future(places.take("a"))
    await asyncio.sleep(0)
    if at_the_same_moment:
        places.give_back("a")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not at_the_same_moment:
        places.give_back("a")
    async with asyncio.timeout(5):
        await places.take("b")


async def test_a_place_that_comes_to_one_who_is_just_cancelled_goes_on() -> None:
    places = FairPlaces(1, share=1, line=10)
    await places.take("a")
    waiting = asyncio.ensure_future(places.take("a"))
    await asyncio.sleep(0)
    waiting.cancel()
    places.give_back("a")
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(5):
        await places.take("b")


async def test_who_finds_no_room_in_the_line_holds_nothing() -> None:
    places = FairPlaces(1, share=1, line=1)
    await places.take("a")
    waiting = asyncio.ensure_future(places.take("a"))
    await asyncio.sleep(0)
    with pytest.raises(LineFullError):
        await places.take("a")
    places.give_back("a")
    await waiting
