"""Requests cancelled at each stage leave nothing behind in services on real vLLM: no job, no pin, no mark.

What the engine itself holds is looked at in ``test_gating.py``. Here it has 9 blocks of 128 tokens, and each
stage is cancelled several times; a request that needs 8 of them at once is answered then.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from cases import picture, text, user
from deployment import SMALL_MODEL, Deployment, Deployments
from services import frozen, health
from test_faults import Question, back

from epd_common.bus import Bus
from epd_common.client import CHAT
from epd_common.protocol import subjects
from epd_common.store import open_redis

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TIMES = 4
WITHIN_S = 4.0
"""A second (invariant I11), on a machine that does other work."""

LONG = "Look at this picture closely, as there will be a question about it afterwards. " * 12
LONGEST = "Look at this picture closely, as there will be a question about it afterwards. " * 25


async def until(check: Callable[[], Awaitable[bool]], what: str, within_s: float = 20.0) -> None:
    try:
        async with asyncio.timeout(within_s):
            while not await check():  # noqa: ASYNC110 - over NATS and files
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {within_s} s") from None


async def queued(deployment: Deployment) -> int:
    """Generate jobs, those included that somebody works on."""
    async with Bus(deployment.stack.nats_url, name="test") as bus:
        return int((await bus.js.stream_info(subjects.GENERATE_STREAM)).state.messages)


@contextlib.asynccontextmanager
async def asked(deployment: Deployment, *parts: Any, **fields: Any) -> AsyncIterator[Any]:
    """A request whose client goes away at the end of the context."""
    body = {"model": deployment.name, "messages": [user(*parts)], **fields}
    async with httpx.AsyncClient(base_url=deployment.url, timeout=60) as client:
        task = asyncio.create_task(client.post(CHAT, json=body))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait((task,))


async def nothing_is_left(deployment: Deployment) -> None:
    pins = deployment.stack.arena / "pins" / "pd-1"

    async def clean() -> bool:
        async with open_redis(deployment.stack.redis_url) as redis:
            marks = [name async for name in redis.scan_iter(match="epd:v1:waiting:*")]
        busy = (await health(deployment, "pd-1"))["busy"]
        return not (await queued(deployment) or busy or marks or list(pins.iterdir()))

    await until(clean, "nothing is left behind", WITHIN_S)


async def in_work(deployment: Deployment) -> None:
    async def busy() -> bool:
        return bool((await health(deployment, "pd-1"))["busy"] == 1)

    await until(busy, "the PD worker has it")


async def cancel_queued(deployment: Deployment, part: Any) -> None:
    async with frozen(deployment, "pd"):
        async with asked(deployment, text(LONG), part):

            async def there() -> bool:
                return await queued(deployment) == 1

            await until(there, "it is queued")

        async def gone() -> bool:
            return await queued(deployment) == 0

        await until(
            gone, "it is off the queue, though no worker lives that could drop it", WITHIN_S
        )


async def cancel_waiting(deployment: Deployment, part: Any) -> None:
    """Its picture comes first, so it is held outside of the engine."""
    async with frozen(deployment, "encoder"):
        async with asked(deployment, part, text("What is in image #1?")):
            await in_work(deployment)
        await nothing_is_left(deployment)


async def cancel_prefilling(deployment: Deployment, part: Any) -> None:
    """Some 440 tokens of text are prefilled, and hold blocks while their picture does not come."""
    async with frozen(deployment, "encoder"):
        async with asked(deployment, text(LONG), part):
            await in_work(deployment)
            await asyncio.sleep(0.5)  # the engine says to nobody how far it is
        await nothing_is_left(deployment)


async def cancel_decoding(deployment: Deployment, part: Any) -> None:
    body = {
        "model": deployment.name,
        "messages": [user(text(LONG), part)],
        "stream": True,
        "max_tokens": 400,
        "ignore_eos": True,
    }
    async with (
        httpx.AsyncClient(base_url=deployment.url, timeout=60) as client,
        client.stream("POST", CHAT, json=body) as response,
    ):
        lines = response.aiter_lines()
        tokens = 0
        while tokens < 5:
            tokens += '"content":"' in await anext(lines)


STAGES = {
    "queued": cancel_queued,
    "waiting": cancel_waiting,
    "prefill": cancel_prefilling,
    "decode": cancel_decoding,
}


async def test_cancels_at_each_stage_leave_nothing(deployments: Deployments) -> None:
    deployment = await deployments.get(SMALL_MODEL.name, "little memory")
    await Question(seed=3000).right(deployment)  # the size of pictures is known from now on
    rng = random.Random(3001)
    for title, cancel in STAGES.items():
        for _ in range(TIMES):
            _, part = picture(rng)
            await cancel(deployment, part)
            await nothing_is_left(deployment)
        await back(deployment)
        async with asked(deployment, text(LONGEST), max_tokens=16) as asking:
            async with asyncio.timeout(60):
                response = await asking
        assert response.status_code == 200, (title, response.text)
        used = response.json()["usage"]["prompt_tokens"]
        assert 7 * 128 < used <= 1008, "it needs 8 blocks at once"
        await nothing_is_left(deployment)
    await Question(seed=3002).right(deployment)
