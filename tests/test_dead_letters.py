"""Jobs that nobody will do: each has a letter with the reason, and whoever waits is told."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from direct import Inbox, direct_job, take
from epd_cli.brokers import Brokers, embedded_brokers
from epd_common.bus import Bus
from epd_common.bus.dead_letters import DeadLetters, Letter
from epd_common.errors import BadRequestError, NotFoundError
from epd_common.protocol import GenerateJob, ReplyError, subjects
from epd_common.protocol.codec import encode
from fake_engine import answer_text
from service_stack import ServiceStack, eventually, picture, service_stack, text_of

pytestmark = pytest.mark.slow  # many brokers or processes of its own


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[Brokers]:
    """Brokers of the test's own: the dead-letter stream is empty."""
    async with embedded_brokers(tmp_path / "own") as running:
        yield running


@pytest.fixture
async def stack(own: Brokers, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    async with service_stack(own.nats_url, own.redis_url, tmp_path) as running:
        yield running


async def exhaust(stack: ServiceStack, stage: Any, subject: str) -> None:
    """Have the one job of a subject delivered as often as may be, to workers that say nothing."""
    names = {"encode": subjects.encode_consumer, "generate": subjects.generate_consumer}
    streams = {"encode": subjects.ENCODE_STREAM, "generate": subjects.GENERATE_STREAM}
    lane = subject.split(".")[4]
    for _ in range(5):
        message = await take(stack.bus, streams[stage], names[stage](stack.model, lane))
        assert message.subject == subject
        await message.nak()


async def stop_workers(stack: ServiceStack) -> None:
    for worker in (*stack.encoders, *stack.pds):
        await worker.process.stop()


async def letters(stack: ServiceStack) -> list[Letter]:
    return [letter async for letter in DeadLetters(stack.bus).all()]


async def until_a_letter(stack: ServiceStack) -> Letter:
    async def there() -> bool:
        return bool(await letters(stack))

    await eventually(there, "there is a letter")
    (letter,) = await letters(stack)
    return letter


async def test_a_generate_job_that_kills_each_worker_is_answered_and_buried(
    stack: ServiceStack,
) -> None:
    await stop_workers(stack)
    inbox = await Inbox().listen(stack.bus)
    job = direct_job(stack, inbox)
    subject = subjects.generate_subject(stack.model, "l0")
    await stack.bus.store(subject, job, message_id="exhausted")
    await exhaust(stack, "generate", subject)
    await stack.add_pd()  # only now is there somebody who could be told
    frame = await inbox.error()
    assert (frame.status, frame.code, frame.stage) == (502, "worker_lost", "generate")
    letter = await until_a_letter(stack)
    assert letter.job() == job
    assert (letter.letter.attempts, letter.letter.code) == (5, "worker_lost")
    info = await stack.bus.js.stream_info(subjects.GENERATE_STREAM)
    assert info.state.messages == 0


async def test_an_encode_job_that_kills_each_worker_fails_its_requests(
    stack: ServiceStack,
) -> None:
    for encoder in stack.encoders:
        encoder.engine.gate.clear()
    one = picture()
    asking = asyncio.create_task(stack.ask("x", one))
    (encoder,) = stack.encoders
    await eventually(lambda: bool(encoder.engine.encoded), "it is in work")
    encoder.process.task.cancel()  # as if it were killed: the job is not given back
    await asyncio.wait((encoder.process.task,))
    subject = subjects.encode_subject(stack.model, "l0")
    consumer = subjects.encode_consumer(stack.model, "l0")
    while True:
        message = await take(stack.bus, subjects.ENCODE_STREAM, consumer)
        await message.nak()
        if message.metadata.num_delivered == 5:
            break
    assert message.subject == subject
    await stack.add_encoder()  # who buries it, and encodes it when the PD worker orders it anew
    assert text_of(await asking) == answer_text("x", one)
    letter = await until_a_letter(stack)
    assert letter.letter.stage == "encode"


async def test_requeue(stack: ServiceStack) -> None:
    """What was given up for a reason that is over is done after all."""
    (pd,) = stack.pds
    pd.engine.crash = True
    inbox = await Inbox().listen(stack.bus)
    job = direct_job(stack, inbox, deadline=4_000_000_000.0)
    await stack.bus.store(
        subjects.generate_subject(stack.model, "l0"), job, message_id="to be requeued"
    )
    letter = await until_a_letter(stack)
    assert isinstance(inbox.frames[-1], ReplyError)
    pd.engine.crash = False
    await DeadLetters(stack.bus).requeue(letter.number, timeout_s=30)
    await eventually(lambda: len(inbox.frames) > 2, "it is answered")
    assert await letters(stack) == []


async def test_what_cannot_be_requeued(stack: ServiceStack) -> None:
    await stack.bus.js.publish(subjects.generate_subject(stack.model, "l0"), b"no job at all")
    letter = await until_a_letter(stack)
    with pytest.raises(BadRequestError, match="holds no job"):
        await DeadLetters(stack.bus).requeue(letter.number, timeout_s=1)
    assert await letters(stack) == [letter]
    await DeadLetters(stack.bus).drop(letter.number)
    await DeadLetters(stack.bus).drop(letter.number)
    with pytest.raises(NotFoundError):
        await DeadLetters(stack.bus).get(letter.number)


async def test_no_stream_no_letters(own: Brokers) -> None:
    async with Bus(own.nats_url, name="test") as bus:
        assert [letter async for letter in DeadLetters(bus).all()] == []


async def epd(own: Brokers, *words: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "epd_cli", "dlq", *words, "--nats", own.nats_url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_the_command(stack: ServiceStack, own: Brokers) -> None:
    secret = "a very long text " * 500
    body = json.dumps({"messages": [{"role": "user", "content": secret}]}).encode()
    job = GenerateJob(request_id="r-1", model=stack.model, body=body, deadline=float("nan"))
    await stack.bus.js.publish(subjects.generate_subject(stack.model, "l0"), encode(job))
    await stack.bus.js.publish(subjects.encode_subject(stack.model, "l0"), b"nothing")

    async def both() -> bool:
        return len(await letters(stack)) == 2

    await eventually(both, "there are two letters")
    code, out = await epd(own, "list", "--json")
    listed = {each["stage"]: each for each in json.loads(out)}
    assert (code, set(listed)) == (0, {"encode", "generate"})
    assert listed["generate"]["code"] == "malformed_message"
    code, out = await epd(own, "list")
    assert code == 0 and "2 dead letters" in out
    number = str(listed["generate"]["number"])
    code, out = await epd(own, "show", number)
    shown = json.loads(out)
    assert (code, shown["job"]["request_id"]) == (0, "r-1")
    assert secret not in out
    code, out = await epd(own, "requeue", str(listed["encode"]["number"]))
    assert code == 1 and "holds no job" in out
    code, out = await epd(own, "drop")
    assert code == 2 and "--all" in out
    code, out = await epd(own, "drop", number)
    assert code == 0
    code, out = await epd(own, "show", number)
    assert code == 1 and f"no dead letter {number}" in out
    code, out = await epd(own, "drop", "--all")
    assert (code, await letters(stack)) == (0, [])
