"""A place's queue on a real NATS: its owner comes first, and no job waits for one that is full or gone."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from direct import direct_job
from epd_common.bus import (
    Bus,
    Delivery,
    JobPuller,
    declare_consumers,
    declare_place,
    declare_streams,
    streams,
)
from epd_common.bus.queues import places_with_jobs, queue_length
from epd_common.protocol import GenerateJob, decode, encode, subjects
from epd_common.protocol.lanes import AGED_WAITS_S, lane_waits_s
from epd_pd.other_places import LOOKERS, MOST, QUIET_LOOK_S, to_look_into
from epd_pd.settings import PdSettings
from service_stack import ServiceStack, Worker, bare_stack, eventually

SOON_S = 3 * QUIET_LOOK_S + 2
"""Until the next look into places of others at the latest, and some of it for a machine that is busy."""

BOUND_S = 10.0


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with Bus(nats_url, name="test") as opened:
        await declare_streams(opened, max_jobs=10_000)
        yield opened


@pytest.fixture
def model() -> str:
    return f"place/{secrets.token_hex(6)}"


async def put(bus: Bus, model: str, place: str, name: str, lane: str = "l0") -> int:
    job = GenerateJob(request_id=name, model=model)
    subject = subjects.generate_subject(model, lane, place)
    return await bus.store(subject, job, message_id=f"{model}-{name}")


@contextlib.asynccontextmanager
async def worker(bus: Bus, model: str, name: str, slots: int = 1) -> AsyncIterator[JobPuller]:
    home = await declare_place(bus, model, name)
    lanes = await declare_consumers(bus, "generate", model)
    async with JobPuller(
        bus,
        "generate",
        consumers=[home, *lanes],
        waits_s=(0.0, *lane_waits_s(AGED_WAITS_S)),
        slots=slots,
        last_lane_slots=slots,
        worker=name,
        home=True,
    ) as puller:
        yield puller


@contextlib.asynccontextmanager
async def collecting(puller: JobPuller) -> AsyncIterator[list[str]]:
    """Takes jobs as they come and never ends one; the list has their requests."""
    found: list[str] = []

    async def work() -> None:
        async for delivery in puller.deliveries():
            found.append(name_of(delivery))

    task = asyncio.create_task(work())
    try:
        yield found
    finally:
        puller.stop()
        async with asyncio.timeout(BOUND_S):
            await task


def name_of(delivery: Delivery) -> str:
    return decode(delivery.data, GenerateJob).request_id


# -- which places are looked into -----------------------------------------------------------------


def test_a_place_whose_worker_is_not_ready_is_looked_into_by_all() -> None:
    ready = {f"w{number}" for number in range(20)}
    for own in ready:
        assert to_look_into(own, {"any", own, "gone"}, ready) == ["gone"]


def test_a_ready_workers_place_is_looked_into_by_a_few_others() -> None:
    ready = {f"w{number}" for number in range(20)}
    looked = {own: to_look_into(own, ready | {"any"}, ready) for own in ready}
    for place in ready:
        assert sum(place in places for places in looked.values()) == LOOKERS
    assert all(own not in places and "any" not in places for own, places in looked.items())
    assert to_look_into("a", {"a", "b"}, {"a", "b"}) == ["b"]


def test_places_that_never_were_are_bounded() -> None:
    assert len(to_look_into("a", {f"made-up-{n}" for n in range(1000)}, {"a"})) == MOST
    assert to_look_into("a", {"b.c", "*", "", "x" * 65}, {"a"}) == []


def test_no_worker_is_named_any() -> None:
    with pytest.raises(ValueError, match="every worker"):
        PdSettings(nats_url="nats://n", redis_url="redis://r", model="m", worker_id="any")


# -- the queue ------------------------------------------------------------------------------------


async def test_home_comes_before_the_lanes(bus: Bus, model: str) -> None:
    async with worker(bus, model, "one") as puller:
        for lane in subjects.LANES[:4]:
            await put(bus, model, "any", f"any-{lane}", lane)
        for lane in reversed(subjects.LANES[:4]):
            await put(bus, model, "one", f"home-{lane}", lane)
        order = []
        async for delivery in puller.deliveries():
            order.append(name_of(delivery))
            await delivery.ack()
            puller.release()
            if len(order) == 8:
                puller.stop()
    assert order[0] == "home-l3", "as it came, whatever its lane"
    assert sorted(order[:5]) == ["any-l0", "home-l0", "home-l1", "home-l2", "home-l3"]
    assert puller.taken_from_others == 0


async def test_an_owner_that_waits_is_served_before_those_who_look(bus: Bus, model: str) -> None:
    async with worker(bus, model, "own", 64) as own, worker(bus, model, "other", 64) as other:
        other.look_at([subjects.place_consumer(model, "own")])
        async with collecting(own) as owns, collecting(other) as others:
            for number in range(40):
                await put(bus, model, "own", f"{number}")
                await eventually(lambda n=number: len(owns) + len(others) > n, "taken")
    assert len(owns) >= 38, others
    assert other.taken_from_others == len(others)


async def test_what_a_full_owner_cannot_take_goes_to_another(bus: Bus, model: str) -> None:
    async with worker(bus, model, "own", 1) as own, worker(bus, model, "other", 8) as other:
        other.look_at([subjects.place_consumer(model, "own")])
        async with collecting(own) as owns, collecting(other) as others:
            await put(bus, model, "own", "first")
            await eventually(lambda: owns == ["first"] or others == ["first"], "taken")
            for number in range(3):
                await put(bus, model, "own", f"{number}")
            took_s = await eventually(lambda: len(owns) + len(others) == 4, "all are taken")
    assert took_s < SOON_S
    assert len(owns) == 1 and other.taken_from_others == len(others) == 3


async def test_own_lanes_come_before_homes_of_others(bus: Bus, model: str) -> None:
    await declare_place(bus, model, "gone")
    async with worker(bus, model, "own", 1) as puller:
        puller.look_at([subjects.place_consumer(model, "gone")])
        await put(bus, model, "gone", "gone")
        await put(bus, model, "any", "background", "l4")
        order = []
        async for delivery in puller.deliveries():
            order.append(name_of(delivery))
            await delivery.ack()
            puller.release()
            if len(order) == 2:
                puller.stop()
    assert order == ["background", "gone"]


async def test_queues_of_places_are_counted(bus: Bus, model: str) -> None:
    await put(bus, model, "any", "a")
    await put(bus, model, "one", "b", "l2")
    number = await put(bus, model, "two", "c")
    assert await places_with_jobs(bus, model) == {"any", "one", "two"}
    token = subjects.model_token(model)
    assert (await queue_length(bus, "generate")).jobs[token] == 3
    await bus.js.delete_msg(subjects.GENERATE_STREAM, number)
    assert await places_with_jobs(bus, model) == {"any", "one"}


# -- in the service -------------------------------------------------------------------------------


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    async with bare_stack(nats_url, redis_url, tmp_path) as running:
        await running.add_pd(pd_slots=1)
        await running.add_pd()
        await running.add_gateway()
        await running.ready()
        try:
            yield running
        finally:  # or they would hold the services' end up
            for pd in running.pds:
                pd.engine.gate.set()


async def send(stack: ServiceStack, place: str, lane: str = "l0") -> None:
    job = direct_job(stack, "")
    subject = subjects.generate_subject(stack.model, lane, place)
    await stack.bus.js.publish(subject, encode(job))


def runs(pd: Worker) -> int:
    return len(pd.engine.running)


@pytest.mark.slow
async def test_a_job_goes_to_its_place_or_to_another_where_that_is_full(
    stack: ServiceStack,
) -> None:
    small, large = stack.pds
    for pd in stack.pds:
        pd.engine.gate.clear()
    await send(stack, small.id)
    await eventually(lambda: runs(small) == 1, "its owner has it")
    await send(stack, small.id)
    took_s = await eventually(lambda: runs(large) == 1, "the other has the second one")
    assert took_s < SOON_S

    async def counted() -> bool:
        return (await stack.counters(large)).get("from_others") == 1

    await eventually(counted, "that is counted")
    for pd in stack.pds:
        pd.engine.gate.set()
    await eventually(lambda: not runs(small) and not runs(large), "all is done")


@pytest.mark.slow
async def test_jobs_of_an_owner_that_left_are_done_by_another(stack: ServiceStack) -> None:
    small, large = stack.pds
    await small.process.stop()
    large.engine.gate.clear()
    await send(stack, small.id)
    await send(stack, "never-seen")
    took_s = await eventually(lambda: runs(large) == 2, "the other has both")
    assert took_s < SOON_S
    large.engine.gate.set()


async def test_a_draining_owner_takes_no_more(stack: ServiceStack) -> None:
    small, large = stack.pds
    small.engine.gate.clear()
    large.engine.gate.clear()
    await send(stack, small.id)
    await eventually(lambda: runs(small) == 1, "its owner has it")
    small.process.terminate()
    await send(stack, small.id)
    await eventually(lambda: runs(large) == 1, "the other has the second one")
    assert runs(small) == 1
    small.engine.gate.set()
    large.engine.gate.set()
    await small.process.stop()


@pytest.mark.slow
async def test_a_job_that_a_dead_owner_had_comes_to_another(stack: ServiceStack) -> None:
    """Its worker stopped without a word: as when the process is killed, only the silence tells."""
    home = await stack.bus.js.consumer_info(
        subjects.GENERATE_STREAM, subjects.place_consumer(stack.model, stack.pds[0].id)
    )
    assert home.config.inactive_threshold == 3600
    for pd in stack.pds:
        pd.engine.gate.clear()
    async with worker(stack.bus, stack.model, "dead") as puller, collecting(puller) as found:
        await send(stack, "dead")
        await eventually(lambda: len(found) == 1, "the owner has it")
    took_s = await eventually(
        lambda: sum(map(runs, stack.pds)) == 1, "another has it, without a word of its owner"
    )
    assert took_s < streams.ACK_WAIT_S + 1.5
    for pd in stack.pds:
        pd.engine.gate.set()


async def test_placed_jobs_may_have_all_slots(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """None is kept free of them, as some are of the background lane."""
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        pd = await stack.add_pd(pd_slots=4)
        await stack.add_gateway()
        await stack.ready()
        pd.engine.gate.clear()
        for _ in range(5):
            await send(stack, pd.id)
        await eventually(lambda: runs(pd) == 4, "as many as there are slots")
        pd.engine.gate.set()
