"""Encode, prefill and decode on workers of their own, on real brokers and simulated engines."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from epd_common.health import ask_health
from epd_sim.answers import expected_answer
from service_stack import Worker, eventually, picture
from sim_stack import SimStack, sim_stack

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@contextlib.asynccontextmanager
async def three(
    nats_url: str, redis_url: str, folder: Path, *, prefills: int = 1, decodes: int = 1, **more: Any
) -> AsyncIterator[SimStack]:
    """All prompts are handed over, however short."""
    async with sim_stack(nats_url, redis_url, folder) as stack:
        stack.settings |= {"split_tokens": 0, **more}
        for _ in range(prefills):
            await stack.add_pd(pd_role="prefill")
        for _ in range(decodes):
            await stack.add_pd(pd_role="decode")
        await stack.start(pds=0)
        await eventually(
            lambda: (
                len(stack.registry.decoding(stack.model)) == decodes
                and len(stack.registry.answering(stack.model)) == prefills
            ),
            "all have their roles",
        )
        yield stack


async def counters(stack: SimStack, worker: Worker) -> Counter[str]:
    health: Any = await ask_health(stack.bus, worker.id)
    return Counter(health["counters"])


async def ask(stack: SimStack, text: str, *pictures: bytes, **fields: Any) -> dict[str, Any]:
    """An answer, which is right."""
    answer = await stack.ask(text, *pictures, **fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    body = stack.body(text, *pictures, **fields)
    told = found["choices"][0]["message"]["content"]
    assert told == expected_answer(body, pictures)
    return found


async def streamed(stack: SimStack, text: str, *pictures: bytes, **fields: Any) -> int:
    """Read a streamed answer, which is right; its pieces that have text."""
    pieces = []
    async with stack.streaming(text, *pictures, **fields) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                pieces += [c["delta"].get("content") or "" for c in event["choices"]]
    body = stack.body(text, *pictures, stream=True, **fields)
    assert "".join(pieces) == expected_answer(body, pictures)
    return len(list(filter(None, pieces)))


async def test_a_prompt_is_handed_over(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    async with three(nats_url, redis_url, tmp_path) as stack:
        prefill, decode = stack.pds
        for count in range(4):
            await ask(stack, f"number {count}", *(picture() for _ in range(count)))
        assert (await counters(stack, prefill))["handed_over"] == 4
        found = await counters(stack, decode)
        assert (found["answered"], found["kv_loaded"], found["kv_lost"]) == (4, 4, 0)
        assert not (await counters(stack, prefill))["answered"]
        assert decode.pinned == []


async def test_streams(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    async with three(nats_url, redis_url, tmp_path) as stack:
        pictures = [picture(), picture()]
        assert await streamed(stack, "streamed", *pictures, max_tokens=40, ignore_eos=True) > 20
        assert (await counters(stack, stack.pds[1]))["kv_loaded"] == 1
