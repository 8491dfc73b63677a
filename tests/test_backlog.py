"""Who gets the next generate job: the worker with the least before it, in tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from direct import direct_job
from epd_common.backlog import DECODING_TOKENS, Backlog
from epd_common.bus.puller import LOADED_WAIT_S
from epd_common.costs import ROWS_UNSEEN, prompt_tokens_at_sight
from epd_common.protocol import GenerateJob, Item, Media, encode, subjects
from service_stack import ServiceStack, Worker, bare_stack, eventually

LONG = "x" * 40_000
"""A prompt of some 10,000 tokens."""


def test_a_request_counts_its_prompt_and_then_its_answer() -> None:
    backlog = Backlog()
    share = backlog.add(1_000)
    assert backlog.tokens == 1_000
    share.estimate(3_000)
    assert backlog.tokens == 3_000
    share.prefilled()
    assert backlog.tokens == DECODING_TOKENS
    share.estimate(3_000)
    share.prefilled()
    assert backlog.tokens == DECODING_TOKENS, "what is prefilled stays so"
    share.end()
    share.end()
    share.estimate(3_000)
    assert backlog.tokens == 0


def test_requests_add_up() -> None:
    backlog = Backlog()
    shares = [backlog.add(tokens) for tokens in (100, 200, 300)]
    assert backlog.tokens == 600
    shares[1].end()
    assert backlog.tokens == 400


@pytest.mark.parametrize(
    ("tokens", "level"),
    [(0, 0), (1, 1), (511, 1), (512, 2), (8_192, 6), (40_959, 8), (40_960, 9), (10**7, 9)],
)
def test_the_level_grows_with_the_tokens(tokens: int, level: int) -> None:
    backlog = Backlog()
    backlog.add(tokens)
    assert backlog.level == level


def test_a_job_is_weighed_at_sight() -> None:
    items = [
        Item(key="a", digest="a", media=Media(ref="a"), width=280, height=56),
        Item(key="b", digest="b", media=Media(ref="b")),
    ]
    job = GenerateJob(request_id="r", model="m", body=b"x" * 400, items=items)
    assert prompt_tokens_at_sight(job) == 20 + ROWS_UNSEEN + 100


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    """Two PD workers that hold all answers back."""
    async with bare_stack(nats_url, redis_url, tmp_path) as running:
        for _ in range(2):
            await running.add_pd()
        await running.add_gateway()
        await running.ready()
        for pd in running.pds:
            pd.engine.gate.clear()
        yield running
        for pd in running.pds:
            pd.engine.gate.set()


async def send(stack: ServiceStack, text: str, *, stream: bool = False) -> Worker:
    """Have a job done; the worker that got it."""
    job = direct_job(stack, "", body=msgspec.json.encode(stack.body(text, stream=stream)))
    await stack.bus.js.publish(subjects.generate_subject(stack.model, "l0"), encode(job))

    def owners() -> list[Worker]:
        return [pd for pd in stack.pds if job.request_id in pd.engine.running]

    await eventually(lambda: bool(owners()), "a worker has it")
    return owners()[0]


async def test_short_requests_pass_by_the_worker_with_a_long_prompt(stack: ServiceStack) -> None:
    """By jobs alone the two would take turns."""
    held_up = await send(stack, LONG)
    assert [await send(stack, "hello") is held_up for _ in range(5)] == [False] * 5


async def test_a_prefilled_prompt_holds_nobody_up(stack: ServiceStack) -> None:
    telling = await send(stack, LONG, stream=True)
    await asyncio.sleep(
        2 * LOADED_WAIT_S
    )  # its pulls say what is left to do once they were renewed
    held_up = await send(stack, LONG)
    assert held_up is not telling
    assert [await send(stack, "hello") is telling for _ in range(5)] == [True] * 5
