"""Field cases (docs/field-cases.md) that real vLLM alone can show."""

from __future__ import annotations

import asyncio
import json
import random
import secrets

import pytest
from answers import ask
from cases import picture, text, user
from deployment import Deployment
from nats.aio.msg import Msg
from services import counters

from direct import Inbox
from epd_common.bus import Bus
from epd_common.protocol import GenerateJob, decode, subjects
from epd_common.store import open_redis
from models import shapes
from service_stack import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


async def test_fc17_an_answer_without_the_picture_anywhere(small: Deployment) -> None:
    """Once it is encoded, its bytes may be gone: the decoder has no use for them."""
    rng = random.Random(1700)
    scene, part = picture(rng)
    question = shapes.ask(rng, [scene], "describe")
    jobs: list[GenerateJob] = []
    async with Bus(small.stack.nats_url, name="test", inbox="_INBOX_operator") as bus:

        async def note(message: Msg) -> None:
            jobs.append(decode(message.data, GenerateJob))

        await bus.subscribe("epd.v1.generate.>", note)
        await bus.flush()
        messages = [user(part, text(question.text))]
        first = await ask(small.url, small.name, messages, stream=False)
        await eventually(lambda: bool(jobs), "the job was seen")
        (job,) = jobs
        async with open_redis(small.stack.redis_url) as redis:
            assert await redis.delete(f"epd:v1:media:{job.items[0].media.ref}") == 1
        inbox = Inbox()
        inbox.subject = f"_INBOX_operator.{secrets.token_hex(8)}"
        await inbox.listen(bus)
        again = GenerateJob(
            request_id=secrets.token_hex(16),
            model=job.model,
            body=job.body,
            items=job.items,
            inbox=inbox.subject,
        )
        subject = subjects.generate_subject(job.model, "l0")
        await bus.store(subject, again, message_id=again.request_id)
        await eventually(lambda: len(inbox.frames) == 3, "head, data and end", within_s=60)
    answer = json.loads(inbox.frames[1].data)
    assert answer["choices"][0]["message"]["content"] == first.text == question.answer


async def test_fc10_longer_answers_ask_no_store(small: Deployment) -> None:
    rng = random.Random(1000)
    _, part = picture(rng)
    body = [user(part, text("What is in image #1?"))]
    await ask(small.url, small.name, body, stream=True)

    async with open_redis(small.stack.redis_url) as redis:

        async def commands(tokens: int) -> int:
            before = (await redis.info("stats"))["total_commands_processed"]
            answer = await ask(
                small.url, small.name, body, stream=True, max_tokens=tokens, ignore_eos=True
            )
            assert len(answer.ids) == tokens
            return int((await redis.info("stats"))["total_commands_processed"] - before)

        few, many = await commands(2), await commands(200)
    assert few > 0
    assert many <= few + 10, (few, many)


async def test_fc27_64_requests_for_warm_pictures(small: Deployment) -> None:
    rng = random.Random(2700)
    shown = [picture(rng) for _ in range(4)]
    asked = [shapes.ask(rng, [scene], "describe") for scene, _ in shown]

    async def one(n: int) -> None:
        messages = [user(shown[n % 4][1], text(asked[n % 4].text))]
        answer = await ask(small.url, small.name, messages, stream=n % 2 == 0)
        assert answer.text == asked[n % 4].answer

    await asyncio.gather(*(one(n) for n in range(4)))
    before = (await counters(small, "encoder-1"))["encoded"]
    await asyncio.gather(*(one(n) for n in range(64)))
    assert (await counters(small, "encoder-1"))["encoded"] == before
