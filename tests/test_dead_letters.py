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
from epd_cli import argument_types
from epd_cli.__main__ import main
from epd_cli.brokers import Brokers, embedded_brokers
from epd_common.bus import Bus, declare_place
from epd_common.bus.dead_letters import MAX_NUMBER, DeadLetters, Letter
from epd_common.bus.streams import JOB_MAX_AGE_S, declare_streams
from epd_common.errors import BadRequestError, NotFoundError
from epd_common.protocol import EncodeJob, GenerateJob, Media, ReplyError, subjects
from epd_common.protocol.codec import encode
from epd_common.protocol.control import DeadLetter
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
    lane, *place = subject.split(".")[4:]
    consumer = names[stage](stack.model, lane)
    if place not in ([], ["any"]):
        consumer = await declare_place(stack.bus, stack.model, *place)
    for _ in range(5):
        message = await take(stack.bus, streams[stage], consumer)
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


@pytest.mark.parametrize("place", ["any", "of-one-that-died"])
async def test_a_generate_job_that_kills_each_worker_is_answered_and_buried(
    stack: ServiceStack, place: str
) -> None:
    await stop_workers(stack)
    inbox = await Inbox().listen(stack.bus)
    job = direct_job(stack, inbox)
    subject = subjects.generate_subject(stack.model, "l0", place)
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


# -- what anybody may have written into the stream -----------------------------------------------


async def put(bus: Bus, stage: str, payload: bytes = b"no job", **fields: Any) -> int:
    """A letter of anybody's; its number."""
    letter = DeadLetter(
        stage=stage,
        subject=fields.get("subject", f"epd.v1.{stage}.m.l0"),
        reason=fields.get("reason", "because"),
        code=fields.get("code", "worker_lost"),
        worker="w",
        attempts=5,
        at=fields.get("at", 1.0),
        payload=payload,
    )
    return int((await bus.js.publish(subjects.dlq_subject("encode"), encode(letter))).seq)


@pytest.fixture
async def bus(own: Brokers) -> AsyncIterator[Bus]:
    """A connection to streams of which nobody takes anything."""
    async with Bus(own.nats_url, name="test") as bus:
        await declare_streams(bus, max_jobs=100)
        yield bus


async def jobs(bus: Bus, stream: str) -> list[Any]:
    """Subjects and data of what a stream holds."""
    state = (await bus.js.stream_info(stream)).state
    found = range(state.first_seq, state.last_seq + 1) if state.messages else ()
    return [await bus.js.get_msg(stream, number) for number in found]


async def test_no_letter_is_carried_out_with_the_operators_rights(bus: Bus, own: Brokers) -> None:
    """Its job goes to the queue of its own model and stage, whatever subject somebody wrote into it."""
    job = EncodeJob(
        key="a" * 64, epoch=1, model="a/b c", fingerprint="f", media=Media(ref="0" * 64)
    )
    names = [
        f"$JS.API.STREAM.PURGE.{subjects.DLQ_STREAM}",
        f"$JS.API.STREAM.DELETE.{subjects.GENERATE_STREAM}",
        "$KV.epd_workers.pd.pd-1",
        "epd.v1.cancel.r-1",
        "epd.v1.encode.other.l9",
        "",
        "epd.v1.generate.m.l2.any",
    ]
    numbers = [await put(bus, "encode", encode(job), subject=name) for name in names]
    kept = await put(bus, "encode")
    code, out = await epd(own, "requeue", *map(str, numbers))
    assert code == 0, out
    queued = await jobs(bus, subjects.ENCODE_STREAM)
    lanes = ["l0"] * 6 + ["l2"]
    assert [each.subject for each in queued] == [
        subjects.encode_subject("a/b c", lane) for lane in lanes
    ]
    assert await jobs(bus, subjects.GENERATE_STREAM) == []
    assert [letter.number async for letter in DeadLetters(bus).all()] == [kept]


async def test_a_generate_job_goes_to_its_lane(bus: Bus) -> None:
    job = GenerateJob(request_id="r-1", model="m", inbox="_INBOX.x")
    number = await put(bus, "generate", encode(job), subject="epd.v1.generate.m.l3.any")
    again = await DeadLetters(bus).requeue(number, timeout_s=10)
    assert again == subjects.generate_subject("m", "l3")
    number = await put(bus, "generate", encode(job), subject="nonsense")
    assert await DeadLetters(bus).requeue(number, timeout_s=10) == "epd.v1.generate.m.l0.any"
    for stage, subject in (("other", "epd.v1.other.m.l0"), ("encode", "epd.v1.encode.m.l0")):
        number = await put(bus, stage, encode(job), subject=subject)
        with pytest.raises(BadRequestError, match="holds no job"):
            await DeadLetters(bus).requeue(number, timeout_s=10)
    nameless = encode(GenerateJob(request_id="r-1", model=""))
    number = await put(bus, "generate", nameless)
    with pytest.raises(BadRequestError, match="holds no job"):
        await DeadLetters(bus).requeue(number, timeout_s=10)


async def test_unreadable_letters_are_listed_and_stop_nothing(bus: Bus, own: Brokers) -> None:
    job = encode(
        EncodeJob(key="a" * 64, epoch=1, model="m", fingerprint="f", media=Media(ref="0" * 64))
    )
    junk = int((await bus.js.publish(subjects.dlq_subject("encode"), b"\xc1")).seq)
    jobless = await put(bus, "encode")
    good = await put(bus, "encode", job)
    code, out = await epd(own, "list")
    assert code == 0 and "3 dead letters" in out and "unreadable" in out
    code, out = await epd(own, "list", "--json")
    assert [each["number"] for each in json.loads(out)] == [junk, jobless, good]
    code, out = await epd(own, "show", str(junk))
    assert code == 0 and json.loads(out)["payload_begins"] == repr(b"\xc1")
    code, out = await epd(own, "requeue", "--all")
    assert code == 1
    assert f"dead letter {junk} stays" in out and f"dead letter {jobless} stays" in out
    assert f"dead letter {good} is a job again, of epd.v1.encode.m.l0" in out
    code, out = await epd(own, "list")
    assert "2 dead letters" in out
    code, out = await epd(own, "drop", str(junk))
    assert code == 0
    code, out = await epd(own, "list")
    assert "1 dead letter" in out and "1 dead letters" not in out
    await bus.js.publish(subjects.dlq_subject("encode"), b"\xc1")
    code, out = await epd(own, "drop", "--all")
    assert code == 0
    code, out = await epd(own, "list")
    assert "no dead letters" in out


async def test_a_letters_texts_are_shown_and_not_carried_out(bus: Bus, own: Brokers) -> None:
    reason = "[/bold] [red]blood[/red] \x1b[2J\x1b]0;title\x07 \u202eturned\nnext"
    await put(bus, "encode", reason=reason, code="\x1b[31m", at=float("nan"))
    await put(bus, "\x1b[31m", at=1e300)
    code, out = await epd(own, "list")
    assert code == 0, out
    flat = "".join(char for char in out if char.isascii() and not char.isspace())
    assert "[/bold]" in flat and "[red]blood[/red]" in flat and r"\x1b" in flat
    assert r"\u202e" in flat
    assert not {"\x1b", "\x07", "\u202e"} & set(out)
    code, out = await epd(own, "list", "--json")
    (first, second) = json.loads(out, parse_constant=pytest.fail)
    assert first["reason"] == reason and first["at"] == "nan"
    assert second["at"] == 1e300 and "\x1b" not in out


@pytest.mark.parametrize(
    "words",
    [
        ("show", "-1"),
        ("show", "0"),
        ("show", "99999999999999999999999"),
        ("show", "\N{SUPERSCRIPT TWO}"),
        ("show", "x"),
        ("drop", "-1"),
        ("requeue", "--timeout", "-5", "--all"),
        ("requeue", "--timeout", "nan", "--all"),
        ("requeue", "--timeout", "inf", "--all"),
        ("requeue", "--timeout", "0", "--all"),
        ("requeue", "--timeout", "x", "--all"),
    ],
    ids=" ".join,
)
def test_arguments_that_mean_nothing(words: tuple[str, ...], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["epd", "dlq", *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capsys.readouterr().err
    assert "is no letter's number" in said or "is no time for a job" in said


def test_bounds_of_arguments_are_those_of_the_bus() -> None:
    assert argument_types.MAX_NUMBER == MAX_NUMBER
    assert argument_types.JOB_MAX_AGE_S == JOB_MAX_AGE_S


async def test_numbers_that_no_letter_has(bus: Bus) -> None:
    for number in (-1, 0, 7, MAX_NUMBER, MAX_NUMBER + 1, 10**30):
        with pytest.raises(NotFoundError, match=f"no dead letter {number}"):
            await DeadLetters(bus).get(number)
