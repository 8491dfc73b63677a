"""Which items an encoder gives its tower, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from epd_common.encode.tower_door import TowerDoor, Visit
from epd_common.turns import HOLD_S, Place, Turns
from service_stack import ServiceStack, bare_stack, eventually, picture


def ready(turns: Turns, count: int) -> list[Place]:
    places = [turns.arrive(0.0) for _ in range(count)]
    for place in places:
        turns.ready(place)
    return places


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, [1]), (3, [1, 1, 1]), (4, [2, 1, 1]), (20, [10, 5, 2, 1, 1, 1])]
)
def test_half_of_what_waits_goes_together(count: int, sizes: list[int]) -> None:
    turns = Turns()
    first = ready(turns, 1)
    assert turns.let_in(0.0) == first
    second = ready(turns, 1)
    assert turns.let_in(0.0) == second
    ready(turns, count)
    assert turns.let_in(0.0) == [], "one group is encoded, and one is behind it"
    turns.leave(*first)
    found = []
    inside = [second]
    while group := turns.let_in(0.0):
        found.append(len(group))
        inside.append(group)
        for place in inside.pop(0):
            turns.leave(place)
    assert found == sizes


def test_the_oldest_go_first_whatever_was_ready_first() -> None:
    turns = Turns()
    first, second, third = (turns.arrive(0.0) for _ in range(3))
    turns.ready(third)
    turns.ready(second)
    assert turns.let_in(0.01) == []
    assert turns.again_at(0.01) == HOLD_S
    turns.ready(first)
    assert turns.let_in(0.02) == [first, second]
    assert turns.again_at(0.02) is None, "nobody is held back, the tower is full"


def test_the_queue_says_who_is_older() -> None:
    turns = Turns()
    places = {sequence: turns.arrive(0.0, sequence=sequence) for sequence in (7, 9, 8)}
    local = turns.arrive(0.0)
    for place in (*places.values(), local):
        turns.ready(place)
    assert turns.let_in(0.0) == [places[7], places[8], places[9]]


def test_an_older_one_is_not_waited_for_long() -> None:
    turns = Turns()
    slow, quick = turns.arrive(0.0), turns.arrive(0.0)
    turns.ready(quick)
    assert turns.let_in(HOLD_S / 2) == []
    assert turns.let_in(HOLD_S) == [quick]
    later = turns.arrive(5.0)
    turns.ready(later)
    assert turns.let_in(5.0) == [later], "nor by anyone who comes later"
    turns.ready(slow)
    turns.leave(quick)
    assert turns.let_in(5.0) == [slow]


def test_what_left_holds_nobody_back() -> None:
    turns = Turns()
    gone, here = turns.arrive(0.0), turns.arrive(0.0)
    turns.ready(here)
    turns.leave(gone)
    turns.leave(gone)
    assert turns.let_in(0.0) == [here]
    assert turns.again_at(0.0) is None


# -- the door -------------------------------------------------------------------------------------


async def through(door: TowerDoor, name: str, went: list[str], leave: asyncio.Event) -> None:
    with door.arrived() as visit:
        await visit.enter()
        went.append(name)
        await leave.wait()


async def test_the_door_lets_in_whoever_is_next_when_somebody_leaves() -> None:
    door, went = TowerDoor(), list[str]()
    leaves = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(through(door, f"{n}", went, leaves[n])) for n in range(4)]
    await eventually(lambda: len(went) == 2, "two are in")
    await asyncio.sleep(2 * HOLD_S)
    assert went == ["0", "1"]
    leaves[0].set()
    await eventually(lambda: went == ["0", "1", "2"], "the next one")
    tasks[1].cancel()
    await eventually(lambda: went == ["0", "1", "2", "3"], "a cancelled one has left")
    for leave in leaves:
        leave.set()
    await asyncio.wait(tasks)


async def test_the_door_opens_by_itself_when_one_was_held_back_long_enough() -> None:
    door, went = TowerDoor(), list[str]()
    with door.arrived():
        leave = asyncio.Event()
        task = asyncio.create_task(through(door, "younger", went, leave))
        await asyncio.sleep(HOLD_S / 4)
        assert not went
        await eventually(lambda: went == ["younger"], "it has waited enough", 1.0)
        leave.set()
        await task


async def test_one_that_is_cancelled_at_the_door_is_forgotten() -> None:
    door, went = TowerDoor(), list[str]()
    leaves = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(through(door, f"{n}", went, leaves[n])) for n in range(4)]
    await eventually(lambda: len(went) == 2, "two are in")
    tasks[2].cancel()
    await asyncio.wait((tasks[2],))
    leaves[0].set()
    await eventually(lambda: went == ["0", "1", "3"], "the one behind it")
    for leave in leaves:
        leave.set()
    await asyncio.wait(tasks)


async def test_who_never_enters_may_leave_twice() -> None:
    door = TowerDoor()
    visits: list[Visit] = []
    with door.arrived() as visit:
        visits.append(visit)
        visit.leave()
    assert door._turns.let_in(0.0) == []


# -- in the service -------------------------------------------------------------------------------


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    async with bare_stack(nats_url, redis_url, tmp_path) as running:
        await running.add_encoder()
        await running.add_pd()
        await running.add_gateway()
        await running.ready()
        yield running


async def test_the_pictures_of_a_request_go_in_one_after_the_other(stack: ServiceStack) -> None:
    (encoder,) = stack.encoders
    encoder.engine.gate.clear()
    pictures = [picture() for _ in range(6)]
    asking = asyncio.create_task(stack.ask("what?", *pictures))
    await eventually(lambda: len(encoder.engine.encoded) == 6, "all are prepared")
    await asyncio.sleep(2 * HOLD_S)
    let_in = [pictures.index(data) for data in encoder.engine.in_tower]
    assert let_in == list(range(len(let_in))), "in their order"
    assert len(let_in) < len(pictures), "and not all at once"
    encoder.engine.gate.set()
    assert (await asking).status_code == 200
    assert sorted(encoder.engine.in_tower) == sorted(pictures)
