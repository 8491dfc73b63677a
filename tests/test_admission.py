"""When a request may enter the engine: the policy by itself, and the slots of incomplete requests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from epd_common.errors import UpstreamError
from epd_common.ingest.body import CHAT, COMPLETIONS
from epd_common.protocol import Item, Media
from epd_common.store import EmbeddingHeader
from epd_pd.admission import Admission, may_enter, text_before_first_item
from epd_pd.arrivals import Arrivals, ForecastError

GRID = {"image_grid_thw": [1, 4, 4]}
OTHER = {"image_grid_thw": [1, 4, 6]}
BOUND_S = 2.0


def arrivals(count: int) -> Arrivals:
    return Arrivals([Item(media=Media(ref=str(n)), key=f"{n:064x}") for n in range(count)])


def header(index: int, metadata: dict[str, Any] = GRID) -> EmbeddingHeader:
    return EmbeddingHeader(key=f"{index:064x}", rows=4, width=8, dtype="float32", metadata=metadata)


@pytest.mark.parametrize(
    ("forecast", "pinned", "text", "enters"),
    [
        ([0, 1], [], 0, False),  # nothing to prefill yet
        ([0, 1], [0], 0, True),  # the first item is here
        ([0, 1], [1], 0, False),  # a later one helps nothing
        ([0, 1], [], 64, True),  # text comes first
        ([0], [], 500, False),  # the prompt cannot be made
        ([1], [0], 0, True),  # an item that is here tells its size itself
    ],
)
def test_policy(forecast: list[int], pinned: list[int], text: int, enters: bool) -> None:
    waiting = arrivals(2)
    for index in forecast:
        waiting.forecast(index, GRID)
    for index in pinned:
        waiting.arrive(index, header(index))
    assert may_enter(waiting, text) == enters


def test_text_before_the_first_item() -> None:
    body = {
        "messages": [
            {"role": "system", "content": "12345"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "678"},
                    {"type": "media_ref", "item": 0},
                    {"type": "text", "text": "and more"},
                ],
            },
        ]
    }
    assert text_before_first_item(CHAT, body) == 8
    assert text_before_first_item(COMPLETIONS, {"prompt": "no messages"}) == 0


async def test_incomplete_requests_are_bounded_and_complete_ones_are_not() -> None:
    admission = Admission(max_incomplete=1)
    first, second, whole = arrivals(1), arrivals(1), arrivals(1)
    for waiting in (first, second):
        waiting.forecast(0, GRID)
    whole.arrive(0, header(0))
    async with AsyncExitStack() as stack, asyncio.timeout(BOUND_S):
        await stack.enter_async_context(admission.enter(first, 100))
        blocked = asyncio.create_task(stack.enter_async_context(admission.enter(second, 100)))
        await stack.enter_async_context(admission.enter(whole, 0))
        await stack.enter_async_context(admission.enter(arrivals(0), 0))  # text only
        assert not blocked.done()
        first.arrive(0, header(0))  # complete: its slot is free, though it still runs
        await blocked


async def test_the_end_of_a_request_frees_its_slot() -> None:
    admission = Admission(max_incomplete=1)
    first, second = arrivals(1), arrivals(1)
    for waiting in (first, second):
        waiting.forecast(0, GRID)
    async with asyncio.timeout(BOUND_S):
        async with admission.enter(first, 100):
            pass
        async with admission.enter(second, 100):
            pass


@pytest.mark.parametrize("turns", range(4))
async def test_a_request_that_is_cancelled_twice_frees_its_slot(turns: int) -> None:
    admission = Admission(max_incomplete=1)
    first, second = arrivals(1), arrivals(1)
    for waiting in (first, second):
        waiting.forecast(0, GRID)
    inside = asyncio.Event()

    async def stay() -> None:
        async with admission.enter(first, 100):
            inside.set()
            await asyncio.Event().wait()

    staying = asyncio.create_task(stay())
    async with asyncio.timeout(BOUND_S):
        await inside.wait()
        staying.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        staying.cancel()
        await asyncio.wait((staying,))
        async with admission.enter(second, 100):
            pass


async def test_none_inside_holds_everything_outside_until_it_is_complete() -> None:
    admission = Admission(max_incomplete=0)
    waiting = arrivals(1)
    waiting.forecast(0, GRID)

    async def enter() -> None:
        async with admission.enter(waiting, 1000):
            pass

    entering = asyncio.create_task(enter())
    await asyncio.sleep(0)
    waiting.arrive(0, header(0))
    async with asyncio.timeout(BOUND_S):
        await entering
    assert admission.entered_early == 0


async def test_a_failure_ends_the_wait() -> None:
    admission = Admission(max_incomplete=1)
    waiting = arrivals(1)

    async def enter() -> None:
        async with admission.enter(waiting, 0):
            pytest.fail("must not enter")

    entering = asyncio.create_task(enter())
    await asyncio.sleep(0)
    waiting.fail(UpstreamError("lost"))
    with pytest.raises(UpstreamError, match="lost"):
        async with asyncio.timeout(BOUND_S):
            await entering


def test_a_wrong_forecast_is_a_failure_only_once_it_was_used() -> None:
    waiting = arrivals(1)
    waiting.forecast(0, GRID)
    waiting.forecast(0, OTHER)  # nobody has made a prompt of it yet
    assert waiting.failure is None
    assert waiting.placeholders()[0].metadata == OTHER
    waiting.arrive(0, header(0, OTHER))
    assert waiting.failure is None
    late = arrivals(1)
    late.forecast(0, GRID)
    late.placeholders()
    late.arrive(0, header(0, OTHER))
    assert isinstance(late.failure, ForecastError)
    late.begin_again()
    assert late.failure is None
    assert late.placeholders()[0].metadata == OTHER
