"""The simulated engine's prefix cache, and conversations that come back to the worker that has theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epd_common.ingest.body import RESPONSES
from epd_sim.answers import expected_answer
from epd_sim.prefix_cache import BLOCK_TOKENS, PrefixCache, blocks_of, item_tokens, text_tokens
from epd_sim.scheduler import Scheduler, Sequence
from service_stack import CHAT, image_part, picture
from sim_stack import SimStack, sim_stack

LONG = (
    "Each drawer of the old cabinet held a map of some coast that nobody had charted twice. " * 20
)


def prompt(*texts: str) -> list[bytes]:
    return blocks_of(b"".join(text_tokens(text.encode(), BLOCK_TOKENS) for text in texts))


# -- the cache ------------------------------------------------------------------------------------


def test_a_block_is_known_by_all_that_stands_before_it() -> None:
    cache = PrefixCache(1000)
    assert cache.held(prompt("a", "b")) == 0
    cache.keep(prompt("a", "b"))
    assert cache.held(prompt("a", "b")) == 2 * BLOCK_TOKENS
    assert cache.held(prompt("a", "b", "c")) == 2 * BLOCK_TOKENS
    assert cache.held(prompt("a", "c", "b")) == BLOCK_TOKENS
    assert cache.held(prompt("b", "a")) == cache.held([]) == 0


def test_only_whole_blocks_are_kept() -> None:
    assert len(blocks_of(text_tokens(b"x", BLOCK_TOKENS - 1))) == 0
    assert len(blocks_of(text_tokens(b"x", 3 * BLOCK_TOKENS - 1))) == 2


def test_items_count_by_their_keys() -> None:
    one, two = (blocks_of(item_tokens(key, BLOCK_TOKENS)) for key in ("one", "two"))
    assert one != two and one == blocks_of(item_tokens("one", BLOCK_TOKENS))


def test_the_least_recently_used_goes_and_an_end_before_its_beginning() -> None:
    cache = PrefixCache(4 * BLOCK_TOKENS)
    cache.keep(prompt("a", "b"))
    cache.keep(prompt("x", "y"))
    cache.keep(prompt("a", "b"))
    cache.keep(prompt("z"))
    assert cache.held(prompt("a", "b")) == 2 * BLOCK_TOKENS
    assert cache.held(prompt("x", "y")) == BLOCK_TOKENS
    none = PrefixCache(0)
    none.keep(prompt("a"))
    assert none.held(prompt("a")) == 0


def test_what_is_held_is_not_prefilled_but_for_the_last_token() -> None:
    held = {100: 64, 50: 50}
    made = Scheduler(max_num_seqs=4, budget=1000, held=lambda s: held.get(s.prompt_tokens, 0))
    for tokens in (100, 50, 30):
        made.add(Sequence(tokens, 1))
    step = made.schedule(lambda key: True)
    assert [tokens for _, tokens in step.prefill] == [36, 1, 30]
    assert [sequence.cached for sequence, _ in step.prefill] == [64, 49, 0]


# -- in the services ------------------------------------------------------------------------------


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[SimStack]:
    async with sim_stack(nats_url, redis_url, tmp_path) as running:
        running.settings = {"sim_profile": "qwen2.5-vl-7b-h100"}
        yield running


async def ask(
    stack: SimStack, messages: list[dict[str, Any]], *media: bytes
) -> tuple[str, str, int]:
    """The answer, who gave it, and how many tokens of the prompt it had."""
    body = {"model": stack.model, "messages": messages, "max_tokens": 8}
    response = await stack.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    details = found["usage"].get("prompt_tokens_details", {})
    text = found["choices"][0]["message"]["content"]
    assert text == expected_answer(body, media), (
        "the answer proves what it was made from, cached or not"
    )
    return text, response.headers["x-epd-worker"], details.get("cached_tokens", 0)


@pytest.mark.slow
async def test_turns_of_a_conversation_come_to_one_worker_and_are_cached(stack: SimStack) -> None:
    await stack.start(pds=4, placement="prefix")
    for number in range(4):
        data = picture((280, 280))
        parts = [image_part(data), {"type": "text", "text": f"{number} {LONG}"}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
        workers, cached = set(), []
        for _ in range(4):
            answer, worker, tokens = await ask(stack, messages, data)
            workers.add(worker)
            cached.append(tokens)
            messages += [
                {"role": "assistant", "content": f"{answer} {LONG}"},
                {"role": "user", "content": "and then?"},
            ]
        assert len(workers) == 1
        assert cached[0] == 0 and cached == sorted(set(cached)), cached
        assert cached[1] > 400, "its picture and text"


async def test_a_cached_prompt_takes_less_time(stack: SimStack) -> None:
    await stack.start()
    messages = [{"role": "user", "content": LONG * 10}]
    seconds = []
    for _ in range(2):
        stack.pd_time.slept.clear()
        await ask(stack, messages)
        seconds.append(stack.pd_time.slept[0])
    assert seconds[1] < seconds[0] / 3


async def test_caching_can_be_turned_off(stack: SimStack) -> None:
    stack.settings["sim_prefix_caching"] = False
    await stack.start()
    messages = [{"role": "user", "content": LONG}]
    assert [(await ask(stack, messages))[2] for _ in range(2)] == [0, 0]


async def test_a_response_tells_what_was_cached_as_a_chat_does(stack: SimStack) -> None:
    await stack.start()
    body = {"model": stack.model, "input": LONG, "max_output_tokens": 8}
    cached = []
    for _ in range(2):
        response = await stack.http.post(RESPONSES, json=body)
        assert response.status_code == 200, response.text
        cached.append(response.json()["usage"]["input_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 < cached[1]
