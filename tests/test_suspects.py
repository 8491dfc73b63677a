"""Which item killed the engines: the one that did is refused, and those beside it never are."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from epd_common.encode.company import Company
from epd_common.errors import UpstreamError
from epd_common.store import Suspects, open_redis
from epd_common.store.suspects import DEATHS_ALONE, REMEMBERED_S, Suspicion
from fake_engine import answer_text
from service_stack import Worker, eventually, picture, service_stack, text_of


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with open_redis(redis_url) as client:
        yield client


@pytest.fixture
def key() -> str:
    return secrets.token_hex(32)


# -- the counts ----------------------------------------------------------------------------------


async def test_what_did_not_end_is_suspected_and_success_clears_it(redis: Redis, key: str) -> None:
    suspects = Suspects(redis)
    assert await suspects.look(key) == Suspicion(0, 0)
    await suspects.begin(key, alone=False)
    assert (await suspects.look(key)).suspect
    await suspects.end(key, alone=False)
    assert not (await suspects.look(key)).suspect
    assert await redis.exists(f"epd:v1:begun:{key}") == 0
    await suspects.begin(key, alone=False)
    await suspects.begin(key, alone=True)
    await suspects.clear(key)
    assert await suspects.look(key) == Suspicion(0, 0)


async def test_deaths_beside_others_prove_nothing(redis: Redis, key: str) -> None:
    suspects = Suspects(redis)
    for _ in range(10):
        await suspects.begin(key, alone=False)
    assert not (await suspects.look(key)).proved
    for _ in range(DEATHS_ALONE):
        assert not (await suspects.look(key)).proved
        await suspects.begin(key, alone=True)
    assert (await suspects.look(key)).proved


async def test_a_death_alone_counts_so_whatever_it_began_as(redis: Redis, key: str) -> None:
    suspects = Suspects(redis)
    await suspects.begin(key, alone=False)
    await suspects.died_alone(key)
    assert await suspects.look(key) == Suspicion(beside=0, alone=1)


async def test_to_look_does_not_renew_the_time(redis: Redis, key: str) -> None:
    suspects = Suspects(redis)
    for alone in (False, True):
        await suspects.begin(key, alone=alone)
    names = [f"epd:v1:begun:{key}", f"epd:v1:begun:{key}:alone"]
    for name in names:
        assert REMEMBERED_S - 5 < await redis.ttl(name) <= REMEMBERED_S
        await redis.expire(name, 100)
    await suspects.look(key)
    assert [await redis.ttl(name) <= 100 for name in names] == [True, True]


# -- who is beside whom --------------------------------------------------------------------------


class Inside:
    """One that is in the engine, or waits for that, until it is told to leave."""

    def __init__(self, company: Company, *, alone: bool = False) -> None:
        self.entered, self.leave = asyncio.Event(), asyncio.Event()
        self.alone: bool | None = None
        self.task = asyncio.create_task(self._stay(company, alone))

    async def _stay(self, company: Company, alone: bool) -> None:
        async with company.enter(alone=alone) as stay:
            self.entered.set()
            await self.leave.wait()
            self.alone = stay.alone

    async def gone(self) -> Inside:
        self.leave.set()
        await self.task
        return self


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_who_must_be_alone_waits_and_nobody_passes_it() -> None:
    company = Company(lambda: True)
    first, second = Inside(company), Inside(company)
    await settled()
    assert first.entered.is_set() and second.entered.is_set(), "any number at once"
    suspect, late = Inside(company, alone=True), Inside(company)
    another = Inside(company, alone=True)
    await settled()
    assert not suspect.entered.is_set() and not late.entered.is_set()
    await first.gone()
    await settled()
    assert not suspect.entered.is_set()
    assert (await second.gone()).alone, "the last that is left is alone"
    await settled()
    assert suspect.entered.is_set() and not another.entered.is_set()
    assert (await suspect.gone()).alone
    await settled()
    assert another.entered.is_set() and not late.entered.is_set()
    another.task.cancel()
    await settled()
    assert late.entered.is_set(), "one that goes away holds nobody up"
    await late.gone()


async def test_one_that_waits_in_vain_to_be_alone_holds_nobody_up() -> None:
    company = Company(lambda: True)
    first, suspect, late = Inside(company), Inside(company, alone=True), Inside(company)
    await settled()
    suspect.task.cancel()
    await settled()
    assert late.entered.is_set()
    await asyncio.gather(first.gone(), late.gone())


async def test_nobody_was_alone_in_an_engine_that_died_with_several() -> None:
    alive = True
    company = Company(lambda: alive)
    several = [Inside(company) for _ in range(3)]
    await settled()
    alive = False
    assert [(await each.gone()).alone for each in several] == [False] * 3


# -- a stack -------------------------------------------------------------------------------------


async def ended(worker: Worker) -> None:
    with pytest.raises(UpstreamError, match="engine died"):
        await worker.process.task


async def test_pictures_beside_a_deadly_one_are_answered(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """One engine dies with all of them, then those that get the deadly one alone, until it is refused."""
    async with service_stack(nats_url, redis_url, tmp_path) as stack:
        deadly, innocent = picture(), [picture() for _ in range(4)]
        (first,) = stack.encoders
        first.engine.gate.clear()
        first.engine.deadly = deadly
        asking = [asyncio.create_task(stack.ask("x", each)) for each in (deadly, *innocent)]
        await eventually(lambda: first.engine.inside == 5, "all are in one engine")
        others = [await stack.add_encoder() for _ in range(4)]
        await eventually(lambda: all(other.engines for other in others), "they have engines")
        for other in others:
            other.engine.deadly = deadly
        first.engine.gate.set()
        refused, *answers = await asyncio.gather(*asking)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["code"] == "media_kills_engine"
        for data, answer in zip(innocent, answers, strict=True):
            assert text_of(answer) == answer_text("x", data)
        dead = [worker for worker in stack.encoders if not worker.engine.alive]
        # Where the innocent had ended it was alone in the first as well.
        assert DEATHS_ALONE <= len(dead) <= 1 + DEATHS_ALONE
        assert first in dead
        for other in others:
            assert other.engine.most_inside <= 1, "suspects are encoded one at a time"
        for worker in dead:
            await ended(worker)
        for data in innocent:
            assert not await stack.redis.exists(f"epd:v1:begun:{stack.key(data)}")
            assert not await stack.redis.exists(f"epd:v1:begun:{stack.key(data)}:alone")


async def test_an_innocent_is_not_refused_however_often_it_was_beside(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """The deadly one comes again and again, each time as new bytes; the innocent is always there."""
    async with service_stack(nats_url, redis_url, tmp_path) as stack:
        innocent = picture()
        for _ in range(3):
            await stack.redis.incr(f"epd:v1:begun:{stack.key(innocent)}")
        assert text_of(await stack.ask("x", innocent)) == answer_text("x", innocent)
        assert not await stack.redis.exists(f"epd:v1:begun:{stack.key(innocent)}")


async def test_suspects_are_encoded_one_at_a_time(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with service_stack(nats_url, redis_url, tmp_path) as stack:
        (encoder,) = stack.encoders
        suspects = [picture() for _ in range(3)]
        for data in suspects:
            await stack.redis.set(f"epd:v1:begun:{stack.key(data)}", 1, ex=60)
        encoder.engine.gate.clear()
        asking = [asyncio.create_task(stack.ask("x", data)) for data in suspects]

        async def here() -> bool:
            return await stack.busy(encoder) == 3

        await eventually(here, "it has all three")
        await eventually(lambda: encoder.engine.inside == 1, "and its engine one")
        encoder.engine.gate.set()
        for data, answer in zip(suspects, await asyncio.gather(*asking), strict=True):
            assert text_of(answer) == answer_text("x", data)
        assert encoder.engine.most_inside == 1


async def test_a_picture_that_waits_while_an_engine_dies_of_another_is_not_suspected(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with service_stack(nats_url, redis_url, tmp_path) as stack:
        (first,) = stack.encoders
        deadly, waiting = picture(), picture()
        await stack.redis.set(f"epd:v1:begun:{stack.key(deadly)}", 1, ex=60)
        first.engine.gate.clear()
        first.engine.deadly = deadly
        refusing = asyncio.create_task(stack.ask("x", deadly))
        await eventually(lambda: first.engine.inside == 1, "the deadly one is alone in there")
        asking = asyncio.create_task(stack.ask("x", waiting))

        async def here() -> bool:
            return await stack.busy(first) == 2

        await eventually(here, "the other one waits for it")
        first.engine.gate.set()
        await ended(first)
        assert not await stack.redis.exists(f"epd:v1:begun:{stack.key(waiting)}:alone")
        assert not await stack.redis.exists(f"epd:v1:begun:{stack.key(waiting)}")
        second = await stack.add_encoder()
        await eventually(lambda: bool(second.engines), "it has an engine")
        second.engine.deadly = deadly
        assert (await refusing).status_code == 400
        await ended(second)
        await stack.add_encoder()
        assert text_of(await asking) == answer_text("x", waiting)
