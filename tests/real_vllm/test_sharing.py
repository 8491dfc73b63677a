"""One encode for one picture, however many ask; and again after an eviction."""

from __future__ import annotations

import asyncio
import random

import pytest
from answers import ask
from deployment import Deployment
from services import counters

from epd_common.store import open_redis
from models import shapes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


async def encodes(deployment: Deployment) -> int:
    """How many pictures the encoder has encoded, by its own count."""
    return (await counters(deployment, "encoder-1")).get("encoded", 0)


def picture(rng: random.Random) -> tuple[shapes.Scene, dict[str, object]]:
    scene = shapes.random_scene(rng)
    uri = shapes.data_uri(shapes.draw(scene, 112, 140, rng))
    return scene, {"type": "image_url", "image_url": {"url": uri}}


async def test_fc37_32_requests_share_one_cold_image(small: Deployment) -> None:
    rng = random.Random(32)
    scene, part = picture(rng)
    questions = [shapes.ask(rng, [scene]) for _ in range(32)]
    before = await encodes(small)
    answers = await asyncio.gather(
        *(
            ask(
                small.url,
                small.name,
                [{"role": "user", "content": [part, {"type": "text", "text": question.text}]}],
                stream=number % 2 == 0,
            )
            for number, question in enumerate(questions)
        )
    )
    assert [a.text for a in answers] == [question.answer for question in questions]
    assert await encodes(small) - before == 1
    origins = [answer.headers["x-epd-items"] for answer in answers]
    assert origins.count("encoded") == 1


async def test_fc05_after_an_eviction_everywhere_it_is_encoded_again(small: Deployment) -> None:
    rng = random.Random(33)
    scene, part = picture(rng)
    question = shapes.ask(rng, [scene], "describe")
    messages = [{"role": "user", "content": [part, {"type": "text", "text": question.text}]}]
    before = await encodes(small)
    first = await ask(small.url, small.name, messages, stream=False)
    again = await ask(small.url, small.name, messages, stream=False)
    assert await encodes(small) - before == 1
    assert again.headers["x-epd-items"] == "reused"
    await evict_everywhere(small)
    evicted = await ask(small.url, small.name, messages, stream=False)
    assert await encodes(small) - before == 2
    assert first.text == again.text == evicted.text == question.answer
    assert evicted.ids == first.ids


async def evict_everywhere(deployment: Deployment) -> None:
    """Drop all embeddings from the stores; the key states go on saying that they are ready."""
    for path in (deployment.stack.arena / "data").iterdir():
        path.unlink()
    async with open_redis(deployment.stack.redis_url) as redis:
        async for key in redis.scan_iter(match="epd:v1:emb:*"):
            await redis.delete(key)
