"""Frames that were lost on the bus are noticed and sent again, from a bounded buffer."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from direct import Inbox, direct_job, publish
from epd_cli.brokers import embedded_brokers
from epd_common.bus import Bus
from epd_common.protocol import ReplayRequest, ReplyData, ReplyEnd, ReplyHead, decode, subjects
from epd_common.protocol.codec import encode
from epd_common.replies import Reply, ReplyHub
from epd_pd import replays
from epd_pd.replays import Replays, SentFrames
from fake_engine import answer_text
from service_stack import (
    BOUND_S,
    ServiceStack,
    eventually,
    picture,
    service_stack,
    stream_text,
    text_of,
)

pytestmark = pytest.mark.slow  # many brokers or processes of its own


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    async with service_stack(nats_url, redis_url, tmp_path) as running:
        yield running


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with Bus(nats_url, name="test") as opened:
        yield opened


@pytest.fixture
async def reply(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reply]:
    """A reply whose request was sent."""
    monkeypatch.setattr("epd_common.replies.reply.LOOK_S", 0.02)
    async with ReplyHub(bus) as hub, hub.expect(secrets.token_hex(8), timeout_s=BOUND_S) as opened:
        opened.submitted = True
        yield opened


def frames(reply: Reply, *pieces: bytes, attempt: int = 1) -> list[bytes]:
    """A whole answer, frame by frame."""
    names = {"request_id": reply.request_id, "attempt": attempt}
    made: list[Any] = [ReplyHead(**names, seq=0, status=200)]
    made += [ReplyData(**names, seq=n, data=piece) for n, piece in enumerate(pieces, start=1)]
    return [encode(frame) for frame in (*made, ReplyEnd(**names, seq=len(made)))]


async def asked_for(bus: Bus, reply: Reply) -> list[ReplayRequest]:
    """What the requester asks for, as it asks."""
    found: list[ReplayRequest] = []

    async def note(message: Msg) -> None:
        found.append(decode(message.data, ReplayRequest))

    await bus.subscribe(subjects.replay_subject(reply.request_id), note)
    await bus.flush()
    return found


async def body_of(reply: Reply) -> bytes:
    return b"".join([piece async for piece in reply.data()])


@pytest.mark.parametrize("lost", [[0], [1], [2, 3], [0, 2, 4], [3]])
async def test_what_is_missing_is_asked_for(bus: Bus, reply: Reply, lost: list[int]) -> None:
    asked = await asked_for(bus, reply)
    sent = frames(reply, b"a", b"b", b"c", b"d")
    for number, frame in enumerate(sent):
        if number not in lost:
            await bus.emit_bytes(reply.inbox, frame)
    await eventually(lambda: bool(asked), "it asks")
    assert (asked[0].attempt, asked[0].seq) == (1, lost[0])
    for frame in sent[lost[0] :]:  # as a worker does: everything from there on
        await bus.emit_bytes(reply.inbox, frame)
    assert (await reply.head()).status == 200
    assert await body_of(reply) == b"abcd"


async def test_a_lost_end_is_asked_for_after_a_silence(
    bus: Bus, reply: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_common.replies.reply.SILENCE_S", 0.3)
    asked = await asked_for(bus, reply)
    sent = frames(reply, b"a")
    for frame in sent[:2]:
        await bus.emit_bytes(reply.inbox, frame)
    await eventually(lambda: bool(asked), "it asks")
    assert asked[-1].seq == 2
    await bus.emit_bytes(reply.inbox, sent[2])
    await reply.head()
    assert await body_of(reply) == b"a"


async def test_a_worker_sends_again_what_is_asked_for(stack: ServiceStack) -> None:
    inbox = await Inbox().listen(stack.bus)
    job = direct_job(stack, inbox)
    await publish(stack, "generate", encode(job))
    await eventually(lambda: any(isinstance(f, ReplyEnd) for f in inbox.frames), "it ends")
    first = list(inbox.frames)
    for attempt, seq, again in ((1, 1, first[1:]), (0, 2, first), (1, 99, []), (7, 0, [])):
        inbox.frames.clear()
        request = ReplayRequest(request_id=job.request_id, attempt=attempt, seq=seq)
        await stack.bus.emit(subjects.replay_subject(job.request_id), request)
        await asyncio.sleep(0.1)
        assert inbox.frames == again
    await stack.bus.emit_bytes(subjects.replay_subject(job.request_id), b"nonsense")
    assert text_of(await stack.ask("lives on")) == answer_text("lives on")


async def test_frames_kept_are_bounded(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "REPLY_BYTES", 100)
    monkeypatch.setattr(replays, "TOTAL_BYTES", 250)
    one = SentFrames("inbox", 1)
    for number in range(50):
        one.add(bytes([number]) * 10)
    assert one.bytes <= 100
    assert one.since(0) == []  # no longer whole
    assert one.since(45) == [bytes([number]) * 10 for number in range(45, 50)]
    kept = Replays(bus)
    for number in range(20):
        kept.begin(f"r{number}", "inbox", 1)
        for _ in range(5):
            kept.note(f"r{number}", bytes(20))
    assert list(kept._sent) == ["r18", "r19"]
    assert kept._bytes == 200


async def test_frames_are_dropped_in_time(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "KEPT_S", 0.0)
    kept = Replays(bus)
    for name in ("old", "new"):
        kept.begin(name, "inbox", 1)
        kept.note(name, b"frame")
        await asyncio.sleep(0.01)
    kept.begin("newest", "inbox", 1)
    kept.note("newest", b"frame")
    assert "old" not in kept._sent and "new" not in kept._sent


async def test_a_stream_goes_on_after_the_broker_was_away(tmp_path: Path) -> None:
    """The frames that were sent meanwhile reach nobody, the last one included."""
    async with embedded_brokers(tmp_path / "own") as own:
        async with service_stack(own.nats_url, own.redis_url, tmp_path) as stack:
            (pd,) = stack.pds
            pd.engine.gate.clear()
            one = picture()
            async with stack.streaming("on and on", one) as response:
                lines = response.aiter_raw()
                first = await anext(lines)
                assert own.nats_or_none is not None
                await own.nats_or_none.stop()
                pd.engine.gate.set()  # it writes to a connection that is away
                await asyncio.sleep(0.2)
                await own.nats_or_none.start()
                rest = [piece async for piece in lines]
            text = stream_text(b"".join([first, *rest]).decode())
            assert text == answer_text("on and on", one)
            assert json.dumps(text)
