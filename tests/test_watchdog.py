"""When an engine counts as hung: the policy, and what a worker does about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from epd_common.protocol import WorkerRecord, decode, subjects
from epd_common.watchdog import Watchdog
from epd_sim.answers import expected_answer
from service_stack import eventually, picture, text_of
from sim_stack import SimStack, sim_stack

STALL_S = 1.5
"""A bound for tests that wait for it; several looks long."""


def watchdog(bound_s: float = 10.0) -> Watchdog:
    made = Watchdog(bound_s=bound_s, longest_look_s=1.0)
    assert not made.look(steps=0, owes=False, since_last_s=0.5)
    return made


def test_no_step_though_it_owes_work_is_a_hang() -> None:
    dog = watchdog()
    looks = [dog.look(steps=0, owes=True, since_last_s=1.0) for _ in range(10)]
    assert looks == [False] * 9 + [True]


def test_a_busy_engine_is_none_however_slow() -> None:
    dog = watchdog()
    for step in range(100):
        assert not any(dog.look(steps=step, owes=True, since_last_s=1.0) for _ in range(9))


def test_an_idle_one_is_none() -> None:
    dog = watchdog()
    assert not any(dog.look(steps=0, owes=False, since_last_s=1.0) for _ in range(1000))


def test_time_adds_up_over_requests_that_end_by_their_deadlines() -> None:
    dog = watchdog()
    for _ in range(3):
        assert not any(dog.look(steps=0, owes=True, since_last_s=1.0) for _ in range(3))
        assert not any(dog.look(steps=0, owes=False, since_last_s=1.0) for _ in range(50))
    assert dog.look(steps=0, owes=True, since_last_s=1.0)


def test_a_process_that_stood_still_is_no_hang() -> None:
    assert not watchdog().look(steps=0, owes=True, since_last_s=3600.0)


def test_without_a_bound_there_is_none() -> None:
    dog = watchdog(bound_s=0)
    assert not any(dog.look(steps=0, owes=True, since_last_s=1.0) for _ in range(1000))


# -- workers ---------------------------------------------------------------------------------------


@pytest.fixture
async def bare(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[SimStack]:
    async with sim_stack(nats_url, redis_url, tmp_path) as made:
        yield made


async def ask_rightly(stack: SimStack, text: str, *pictures: bytes) -> str:
    response = await stack.ask(text, *pictures)
    assert text_of(response) == expected_answer(stack.body(text, *pictures), pictures)
    return response.headers["x-epd-worker"]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["encoder", "pd"])
async def test_fc19_a_hung_engine_ends_its_worker_and_another_answers(
    bare: SimStack, role: str
) -> None:
    """Long before the drain's time, and before the client notices."""
    add = bare.add_encoder if role == "encoder" else bare.add_pd
    hanging = await add(sim_hang_at=1, stall_s=STALL_S, drain_s=300)
    await bare.start(encoders=role == "pd", pds=role == "encoder")
    asking = asyncio.create_task(ask_rightly(bare, "x", picture()))
    await eventually(lambda: hanging.engine.owes, "it hangs")
    told: list[str] = []

    async def note(message: Msg) -> None:
        if message.data and (record := decode(message.data, WorkerRecord)).state == "failed":
            told.append(record.error)

    await bare.bus.subscribe(
        f"$KV.{subjects.WORKERS_BUCKET}.{subjects.worker_key(role, hanging.id)}", note
    )
    other = await add()
    await eventually(hanging.process.task.done, "the worker ends")
    assert "EPD_STALL_S" in told[0]
    error = hanging.process.task.exception()
    assert "computed nothing for 1.5 s" in repr(error)
    answered = await asking
    if role == "pd":
        assert answered == other.id


@pytest.mark.slow
async def test_an_item_that_hangs_two_engines_is_given_to_no_third(bare: SimStack) -> None:
    for _ in range(2):
        await bare.add_encoder(sim_hang_at=1, stall_s=STALL_S)
    await bare.start(encoders=0)
    refused = await bare.ask("x", picture())
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["code"] == "media_kills_engine"
    for worker in bare.encoders:
        await eventually(worker.process.task.done, "each that tried it has ended")
        assert "computed nothing" in repr(worker.process.task.exception())


@pytest.mark.slow
async def test_a_worker_whose_engine_died_does_not_wait_for_the_drain(bare: SimStack) -> None:
    """A request that waits for its picture would notice only then."""
    dying = await bare.add_pd(sim_die_at=1, drain_s=300)
    await bare.start(pds=0)
    bare.encoder_time.passing.clear()
    waiting = asyncio.create_task(ask_rightly(bare, "", picture()))

    async def waits() -> bool:
        return await bare.busy(dying) == 1

    await eventually(waits, "it waits for its picture")
    asking = asyncio.create_task(ask_rightly(bare, "text"))
    await eventually(dying.process.task.done, "the worker ends")
    assert "engine died" in repr(dying.process.task.exception())
    await bare.add_pd()
    await asking
    bare.encoder_time.passing.set()
    await waiting


@pytest.mark.slow
async def test_fc26_a_busy_engine_and_one_that_waits_for_embeddings_live(bare: SimStack) -> None:
    bare.settings["stall_s"] = STALL_S
    await bare.start()
    bare.pd_time.real_s = STALL_S / 4  # slow, and each answer takes many steps
    await ask_rightly(bare, "busy")
    assert sum(1 for _ in bare.pd_time.slept) * bare.pd_time.real_s > 2 * STALL_S
    bare.pd_time.real_s = 0.0
    encoder = bare.encoders[0]
    encoder.engine._tower._faults.begin = asyncio.Event().wait  # it hangs from now on
    asking = asyncio.create_task(bare.ask("waits", picture()))
    await eventually(encoder.process.task.done, "the encoder that hangs is ended")
    assert "computed nothing" in repr(encoder.process.task.exception())
    assert not bare.pds[0].process.task.done()  # which waited for it all the time
    await bare.add_encoder()
    assert (await asking).status_code == 200
    await ask_rightly(bare, "lives")
