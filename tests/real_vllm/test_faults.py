"""What goes wrong with an item ends at most its own request, on real vLLM: nobody dies, others go on."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import httpx
import msgspec
import pytest
from answers import ask
from cases import picture, text, user
from deployment import Deployment
from services import counters, frozen_encoder
from unfit import DAMAGED

from epd_common.client import CHAT
from epd_common.store import open_redis
from models import shapes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MAX_NUM_SEQS = 16
"""The default of ``EPD_MAX_NUM_SEQS``."""

SLOWDOWN, HICCUP_S = 1.5, 0.010


class Question:
    """A question about a new picture."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        scene, part = picture(rng)
        asked = shapes.ask(rng, [scene], "describe")
        self.messages = [user(part, text(asked.text))]
        self.answer = asked.answer

    async def right(self, deployment: Deployment) -> None:
        answer = await ask(deployment.url, deployment.name, self.messages, stream=False)
        assert answer.text == self.answer


@pytest.mark.parametrize("how", DAMAGED)
async def test_fc15_a_damaged_embedding_is_made_again(small: Deployment, how: str) -> None:
    question = Question(seed=sum(how.encode()))
    data = small.stack.arena / "data"
    for path in data.iterdir():
        path.unlink()
    await question.right(small)
    (path,) = data.iterdir()
    damaged = path.with_name(f".{path.name}")
    damaged.write_bytes(DAMAGED[how](path.read_bytes()))
    before = await counters(small, "pd-1")
    damaged.rename(path)
    await question.right(small)
    after = await counters(small, "pd-1")
    assert after["integrity_faults"] - before.get("integrity_faults", 0) == 1
    assert after["reordered"] - before.get("reordered", 0) == 1


async def test_a_wrong_forecast_of_a_size_costs_another_beginning(small: Deployment) -> None:
    """The request is in the engine, with too little room for its picture, when that arrives."""
    rng = random.Random(901)
    scene = shapes.random_scene(rng)
    height, width = 112, 308  # a size that no other test has
    uri = shapes.data_uri(shapes.draw(scene, height, width, rng))
    early = text("Look at this picture closely; there will be a question about it afterwards: ")
    part = {"type": "image_url", "image_url": {"url": uri}}
    messages = [user(early, part, text("What is in image #1?"))]
    await Question(seed=900).right(small)  # there is a table then
    async with open_redis(small.stack.redis_url) as redis:
        (table,) = [name async for name in redis.scan_iter(match="epd:v1:sizes:*")]
        wrong = msgspec.msgpack.encode({"metadata": {"image_grid_thw": [1, 2, 2]}, "rows": 1})
        await redis.hset(table, f"image:{width}x{height}:{{}}", wrong)
    before = await counters(small, "pd-1")
    async with frozen_encoder(small):
        asking = asyncio.create_task(ask(small.url, small.name, messages, stream=False))
        await asyncio.sleep(
            0.5
        )  # its text is prefilled; no encoder has said how large the picture is
    first = await asking
    after = await counters(small, "pd-1")
    assert after["wrong_forecasts"] - before.get("wrong_forecasts", 0) == 1
    again = await ask(small.url, small.name, messages, stream=False)
    assert (await counters(small, "pd-1"))["wrong_forecasts"] == after["wrong_forecasts"]
    theirs = await ask(small.colocated_url, small.name, messages, stream=False)
    assert first.ids == again.ids == theirs.ids


async def ttft_s(deployment: Deployment, client: httpx.AsyncClient) -> float:
    """Of a text request."""
    body = {
        "model": deployment.name,
        "messages": [user(text("Hello."))],
        "max_tokens": 2,
        "stream": True,
    }
    started = time.perf_counter()
    async with client.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if '"content":"' in line and '"content":""' not in line:
                return time.perf_counter() - started
    raise AssertionError("no token came")


async def ttfts(deployment: Deployment) -> list[float]:
    async with httpx.AsyncClient(base_url=deployment.url, timeout=30) as client:
        return sorted([await ttft_s(deployment, client) for _ in range(30)])


async def test_fc06_pictures_that_never_come(small: Deployment) -> None:
    """More such requests than the engine runs at once: text goes on, and each ends by its deadline."""
    await ttfts(small)
    alone = await ttfts(small)
    questions = [Question(seed) for seed in range(1000, 1000 + MAX_NUM_SEQS + 4)]
    async with (
        frozen_encoder(small),
        httpx.AsyncClient(base_url=small.url, timeout=60) as client,
    ):
        waiting = [
            asyncio.create_task(
                client.post(
                    CHAT,
                    json={"model": small.name, "messages": question.messages},
                    headers={"x-epd-deadline-s": "8"},
                )
            )
            for question in questions
        ]
        await asyncio.sleep(1.0)  # all are where they wait
        beside = await ttfts(small)
        assert not any(task.done() for task in waiting)
        responses = await asyncio.gather(*waiting)
    for response in responses:
        assert response.status_code == 504
        error = response.json()["error"]
        assert (error["code"], error["stage"]) == ("deadline_exceeded", "encode")
        assert len(error["key"]) == 64 and error["key"] in error["message"]
    assert beside[15] <= SLOWDOWN * alone[15] + HICCUP_S, (alone[15], beside[15])
    print(f"text TTFT p50: alone {alone[15] * 1e3:.1f} ms, beside {beside[15] * 1e3:.1f} ms")
    await back(small)
    await questions[0].right(small)


async def back(deployment: Deployment) -> None:
    """The encoder is seen as ready again."""
    async with asyncio.timeout(30), httpx.AsyncClient(base_url=deployment.url) as client:
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0.1)


async def test_fc21_an_encoder_killed_in_its_work(small: Deployment) -> None:
    """Its jobs wait for the next one, which begins them anew."""
    encoder = next(s for s in small.stack.services if s.role == "encoder")
    questions = [Question(seed) for seed in range(1100, 1108)]
    asking = [asyncio.create_task(question.right(small)) for question in questions]
    await asyncio.sleep(0.05)
    encoder.signal(signal.SIGKILL)
    await encoder.wait()
    await encoder.start()
    await asyncio.gather(*asking)
