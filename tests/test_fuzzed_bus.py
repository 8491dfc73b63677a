"""Junk and forgeries on every subject of the bus: nobody dies or hangs, and who asks is answered."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg

from direct import Inbox, direct_job
from epd_cli.brokers import embedded_brokers
from epd_common.bus.dead_letters import DeadLetters
from epd_common.protocol import (
    Cancel,
    EmbeddingEvent,
    EncodeJob,
    GenerateJob,
    Item,
    Locator,
    Media,
    ProtocolError,
    ReplayRequest,
    ReplyData,
    ReplyEnd,
    ReplyError,
    ReplyHead,
    WorkerRecord,
    decode,
    decode_reply,
    encode,
    subjects,
)
from epd_common.protocol.keys import digest, embedding_key
from epd_pd.salvage import check_job
from epd_sim.answers import expected_answer
from mutations import mutated
from service_stack import CHAT, eventually, picture
from sim_stack import SimStack, sim_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 20_260_101
MESSAGES = 21_000
WAVE = 300
"""So many for each normal request that is asked meanwhile."""

WITHIN_S = 240.0
"""For the workers to be through with all of it, on a busy machine."""

ADVISORY = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{}.fuzz"


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[SimStack]:
    async with (
        embedded_brokers(tmp_path / "brokers") as own,
        sim_stack(own.nats_url, own.redis_url, tmp_path) as made,
    ):
        made.settings |= {"deadline_s": 20.0}
        await made.start()
        yield made


async def ask(stack: SimStack, text: str, *pictures: bytes) -> None:
    """A normal request, which is answered, and rightly."""
    body = stack.body(text, *pictures)
    answer = await stack.http.post(CHAT, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == expected_answer(body, pictures)


class Fuzz:
    """What is sent, and what must come of it."""

    def __init__(self, stack: SimStack) -> None:
        self.stack = stack
        self.rng = random.Random(SEED)
        self.sent: Counter[str] = Counter()
        self.buried = 0
        self.answers: dict[str, list[Any]] = {}
        self.owed: dict[str, bytes] = {}
        """Malformed jobs, by their inboxes."""
        self.prefix = f"_INBOX.fuzz-{secrets.token_hex(4)}"
        self.records: set[str] = set()
        self.gateway_inboxes: list[str] = []
        self.waited_for: list[str] = []
        """Keys that somebody may wait for now."""

    async def open(self) -> None:
        async def note(message: Msg) -> None:
            self.answers.setdefault(message.subject, []).append(decode_reply(message.data))

        async def sniff(message: Msg) -> None:
            if message.subject.count(".") == 2:
                self.gateway_inboxes[:] = [*self.gateway_inboxes[-20:], message.subject]

        bus = self.stack.bus
        await bus.subscribe(f"{self.prefix}.>", note)
        await bus.subscribe(f"{subjects.inbox_prefix('gateway')}.>", sniff)
        await bus.flush()

    def _item(self) -> tuple[Item, str]:
        data = picture()
        key = embedding_key(media_digest=digest(data), fingerprint=self.stack.fingerprint)
        return Item(media=Media(inline=data), key=key, digest=digest(data)), key

    def generate(self) -> tuple[str, bytes]:
        inbox = f"{self.prefix}.{self.sent['generate']}"
        item, _ = self._item()
        content = [{"type": "media_ref", "item": 0}, {"type": "text", "text": "see"}]
        body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
        job = direct_job(
            self.stack, inbox, items=[item], body=body, deadline=time.time() + 30, scope=""
        )
        raw = mutated(self.rng, encode(job))
        subject = subjects.generate_subject(self.stack.model, "l0")
        if is_malformed(raw, self.stack.model, subject):
            self.buried += 1
            if names_inbox(raw, inbox):
                self.owed[inbox] = raw
        return subject, raw

    def encode(self) -> tuple[str, bytes]:
        item, key = self._item()
        job = EncodeJob(
            key=self.rng.choice([key, *self.waited_for[-3:]]),
            epoch=int(time.time() * 1000),
            model=self.stack.model,
            fingerprint=self.stack.fingerprint,
            media=item.media,
            deadline=time.time() + 30,
        )
        return subjects.encode_subject(self.stack.model, "l1"), mutated(self.rng, encode(job))

    def ready(self) -> tuple[str, bytes]:
        key = self.rng.choice(self.waited_for[-4:] or ["0" * 64])
        state: Any = self.rng.choice(("sized", "ready", "failed"))
        event = EmbeddingEvent(
            key=key,
            epoch=int(time.time() * 1000) + self.rng.choice((-(10**9), -1, 0, 1, 10**9, 1 << 61)),
            state=state,
            fingerprint=self.stack.fingerprint,
            metadata={"image_grid_thw": [1, self.rng.choice((2, 4, 10**6)), 4]},
            rows=self.rng.choice((0, 1, 4, 1 << 40)),
            width=3584,
            dtype="bfloat16",
            bytes=28_672,
            checksum=self.rng.randbytes(16).hex(),
            locators=[Locator(store=self.rng.choice(("arena", "redis", "x"))), Locator(store="")],
            encoder=self.rng.choice(("", self.stack.encoders[0].id)),
            status=self.rng.choice((0, 400, 404, 413, 500, 502, 504, -1, 1 << 40)),
            code=self.rng.choice(("", "media_kills_engine", "media_gone")),
            reason="forged",
        )
        raw = encode(event)
        return subjects.ready_subject(key), raw if self.rng.random() < 0.5 else self._mutated(raw)

    def _mutated(self, raw: bytes) -> bytes:
        return mutated(self.rng, raw)

    def cancel(self) -> tuple[str, bytes]:
        request = self.rng.choice(("nobody", "x" * 200, secrets.token_hex(16)))
        raw = encode(Cancel(request_id=request, reason="fuzz"))
        return subjects.cancel_subject(request), self._mutated(raw)

    def replay(self) -> tuple[str, bytes]:
        seq, attempt = (self.rng.choice((-(1 << 63), -1, 0, 5, (1 << 63) - 1)) for _ in range(2))
        raw = encode(ReplayRequest(request_id="nobody", attempt=attempt, seq=seq))
        return subjects.replay_subject("nobody"), self._mutated(raw)

    def record(self) -> tuple[str, bytes]:
        name = f"fuzz{self.sent['record'] % 50}"
        role: Any = self.rng.choice(("gateway", "encoder", "pd"))
        record = WorkerRecord(
            role=role,
            worker=name,
            node="nowhere",
            state="ready",
            beat=self.rng.choice((0, 1, 1 << 62)),
            ttl_s=self.rng.choice((-1.0, 0.0, 6.0, 1e308)),
            model=f"fuzz/{name}",
            fingerprint="f" * 64,
            modalities=["image"],
            encodes="queue",
        )
        key = subjects.worker_key(role, name)
        self.records.add(key)
        return f"$KV.{subjects.WORKERS_BUCKET}.{key}", self._mutated(encode(record))

    def advisory(self) -> tuple[str, bytes]:
        stream = self.rng.choice((subjects.ENCODE_STREAM, subjects.GENERATE_STREAM))
        number: Any = self.rng.choice((-1, 0, 1 << 40, 1 << 63, 1 << 70, None, "x", 1.5))
        raw = json.dumps({"stream_seq": number, "deliveries": 5}).encode()
        if self.rng.random() < 0.5:
            raw = raw[: self.rng.randrange(len(raw))] + self.rng.randbytes(3)
        return ADVISORY.format(stream), raw

    def frame(self) -> tuple[str, bytes]:
        """Frames of a reply that is under way, which do not decode."""
        subject = self.rng.choice(self.gateway_inboxes or ["_INBOX_gateway.x.y"])
        frames = (
            ReplyHead(request_id="x", attempt=1, seq=0, status=200),
            ReplyData(request_id="x", attempt=1, seq=1, data=b"wrong"),
            ReplyEnd(request_id="x", attempt=1, seq=2),
            ReplyError(request_id="x", attempt=1, seq=0, status=500, code="x", message="wrong"),
        )
        raw = encode(self.rng.choice(frames))
        while True:
            junk = self._mutated(raw)
            try:
                decode_reply(junk)
            except ProtocolError:
                return subject, junk

    async def send(self, count: int) -> None:
        kinds = ("generate", "encode", "ready", "cancel", "replay", "record", "advisory", "frame")
        weights = (4, 4, 5, 2, 2, 2, 1, 1)
        client = self.stack.bus.client
        for number in range(count):
            kind = self.rng.choices(kinds, weights)[0]
            subject, raw = getattr(self, kind)()
            self.sent[kind] += 1
            await client.publish(subject, raw)
            if number % 100 == 0:
                await self.stack.bus.flush()
        await self.stack.bus.flush()


def is_malformed(raw: bytes, model: str, subject: str) -> bool:
    try:
        check_job(decode(raw, GenerateJob), model, subject=subject)
    except ProtocolError:
        return True
    return False


def names_inbox(raw: bytes, inbox: str) -> bool:
    try:
        found = msgspec.msgpack.decode(raw)
        return bool(found["inbox"] == inbox) and isinstance(found.get("request_id", ""), str)
    except Exception:
        return False


async def drained(stack: SimStack, *streams: str) -> bool:
    states = [(await stack.bus.js.stream_info(stream)).state for stream in streams]
    return not any(state.messages for state in states)


async def test_thousands_of_mutated_messages_on_every_subject(stack: SimStack) -> None:
    fuzz = Fuzz(stack)
    await fuzz.open()
    await ask(stack, "before", picture())
    for wave in range(MESSAGES // WAVE):
        data = picture()
        fuzz.waited_for.append(stack.key(data))
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(stack, f"meanwhile {wave}", data))
            group.create_task(fuzz.send(WAVE))
    assert sum(fuzz.sent.values()) == MESSAGES

    queues = (subjects.GENERATE_STREAM, subjects.ENCODE_STREAM, subjects.EXHAUSTED_STREAM)
    await eventually(lambda: drained(stack, *queues), "the queues are empty", WITHIN_S)
    for worker in (*stack.encoders, *stack.pds):
        assert not worker.process.task.done()
        await eventually(functools.partial(idle, stack, worker), f"{worker.id} is idle", 60)
    assert not stack.gateway.task.done()
    data = picture()
    await ask(stack, "after", data)

    # Whoever could be told was told.
    assert len(fuzz.owed) > 500
    for inbox, raw in fuzz.owed.items():
        frames = fuzz.answers.get(inbox, [])  # twice where its burial took long
        assert {frame.code for frame in frames} == {"malformed_message"}, (raw, frames)
    letters = Counter([letter.letter.stage async for letter in DeadLetters(stack.bus).all()])
    assert letters["generate"] >= fuzz.buried > 1000
    assert letters["encode"] > 1000
    for key in fuzz.records:
        await stack.bus.client.publish(
            f"$KV.{subjects.WORKERS_BUCKET}.{key}", b"", headers={"KV-Operation": "DEL"}
        )


async def idle(stack: SimStack, worker: Any) -> bool:
    return await stack.busy(worker) == 0


@pytest.mark.parametrize("stage", ["generate", "encode"])
async def test_what_does_not_decode_is_told_and_buried(stack: SimStack, stage: str) -> None:
    inbox = await Inbox().listen(stack.bus)
    item = {"media": {"inline": picture()}}
    wrong: dict[str, Any] = {
        "generate": {"t": "generate", "v": 1, "request_id": "r", "model": 5, "items": [item]},
        "encode": {"t": "encode", "v": 1, "key": "0" * 64, "epoch": 1 << 62, "model": stack.model}
        | {"fingerprint": "", **item},
    }[stage] | {"inbox": inbox.subject}
    subject = getattr(subjects, f"{stage}_subject")(stack.model, "l0")
    await stack.bus.js.publish(subject, msgspec.msgpack.encode(wrong))
    if stage == "generate":
        frame = await inbox.error()
        assert (frame.status, frame.code) == (400, "malformed_message")

    async def buried() -> bool:
        return [x.letter.stage async for x in DeadLetters(stack.bus).all()] == [stage]

    await eventually(buried, "it is in the dead-letter stream")
    (letter,) = [letter async for letter in DeadLetters(stack.bus).all()]
    assert letter.letter.payload == msgspec.msgpack.encode(wrong)
    assert letter.letter.code == "malformed_message"


async def test_a_forged_embedding_in_the_arena_is_not_shown(stack: SimStack) -> None:
    """A ready event that names an embedding of other bytes, which lies in the arena under the right name."""
    stack.encoder_time.passing.clear()
    data, other = picture(), picture()
    asking = asyncio.create_task(ask(stack, "which", data))
    key = stack.key(data)
    state = f"epd:v1:state:{key}"

    async def claimed() -> bool:
        return bool(await stack.redis.exists(state))

    await eventually(claimed, "it is ordered")
    epoch = int(await stack.redis.hget(state, "epoch"))
    (stack.encoders[0].arena / "data" / key).write_bytes(other)
    forged = EmbeddingEvent(key=key, epoch=epoch, state="ready", rows=1, width=1, dtype="float16")
    await stack.bus.emit(subjects.ready_subject(key), forged)
    await stack.bus.flush()
    stack.encoder_time.passing.set()
    await asking
