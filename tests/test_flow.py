"""Whole requests through gateway, encoder and PD worker on real brokers; only the model is a fake.

Its answers name the digests of the pictures that it was given, so a wrong embedding is a wrong answer.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import msgspec
import nats.js.errors
import pytest
from nats.aio.msg import Msg
from PIL import Image

from direct import Inbox, direct_job, publish
from epd_cli.brokers import Brokers, embedded_brokers
from epd_common.bus import Bus
from epd_common.errors import EpdError, UpstreamError
from epd_common.protocol import (
    Cancel,
    DeadLetter,
    EmbeddingEvent,
    EncodeJob,
    GenerateJob,
    Item,
    Media,
    ReplyData,
    ReplyEnd,
    ReplyError,
    ReplyHead,
    decode,
    subjects,
)
from epd_common.protocol.codec import encode
from epd_common.protocol.keys import digest
from epd_common.replies import EVENT_STREAM, Reply, ReplyHub
from epd_common.store import KeyStates, SizeTable, StoreFullError
from fake_engine import answer_text, tag
from service_stack import (
    BOUND_S,
    CHAT,
    ServiceStack,
    Worker,
    bare_stack,
    eventually,
    image_part,
    picture,
    service_stack,
    stream_text,
    text_of,
)

CANCEL_BOUND_S = 1.0  # invariant I11


@pytest.fixture(scope="module")
async def stack(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServiceStack]:
    """One encoder and one PD worker for the tests that leave them as they were."""
    async with service_stack(nats_url, redis_url, tmp_path_factory.mktemp("flow")) as running:
        yield running


@pytest.fixture(autouse=True)
async def quiet(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """After each test on the shared stack: nothing runs, nothing is pinned, all switches are back."""
    yield
    if "stack" not in request.fixturenames:
        return
    stack: ServiceStack = request.getfixturevalue("stack")
    encoder, pd = stack.encoders[0].engine, stack.pds[0].engine
    encoder.gate.set()
    pd.gate.set()
    encoder.failures, encoder.refuse = 0, None
    pd.status, pd.padding, pd.crash = 200, "", False
    await eventually(lambda: not pd.running, "the engine is idle")
    await eventually(lambda: stack.pds[0].pinned == [], "nothing is pinned")


async def dead_letter(stack: ServiceStack, stage: str, payload: bytes) -> DeadLetter:
    """The dead letter of a job, once it is there."""
    found: list[DeadLetter] = []

    async def there() -> bool:
        try:
            raw = await stack.bus.js.get_last_msg(subjects.DLQ_STREAM, subjects.dlq_subject(stage))
        except nats.js.errors.NotFoundError:
            return False
        letter = decode(raw.data or b"", DeadLetter)
        if letter.payload == payload and subjects.model_token(stack.model) in letter.subject:
            found.append(letter)
        return bool(found)

    await eventually(there, "the job is in the dead-letter stream")
    return found[0]


# -- right answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 3, 20])
async def test_pictures_in_right_answer_out(stack: ServiceStack, count: int, stream: bool) -> None:
    pictures = [picture() for _ in range(count)]
    if stream:
        async with stack.streaming("seen", *pictures) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            text = stream_text((await response.aread()).decode())
    else:
        response = await stack.ask("seen", *pictures)
        text = text_of(response)
    assert text == answer_text("seen", *pictures)
    assert response.headers["x-epd-items"].split(",") == ["encoded"] * count
    assert response.headers["x-epd-worker"] == stack.pds[0].id


async def test_tokens_reach_the_client_as_they_appear(stack: ServiceStack) -> None:
    pd = stack.pds[0].engine
    pd.gate.clear()
    async with stack.streaming("later") as response:
        pieces = response.aiter_bytes()
        first = await anext(pieces)
        assert b"later" not in first
        pd.gate.set()
        rest = b"".join([piece async for piece in pieces])
    assert stream_text((first + rest).decode()) == "later"


async def test_fc37_one_cold_picture_for_many_requests_is_encoded_once(stack: ServiceStack) -> None:
    data, encoder, pd = picture(), stack.encoders[0], stack.pds[0]
    before = await stack.counters(encoder)
    encoder.engine.gate.clear()
    asking = [asyncio.create_task(stack.ask(f"request {n}", data)) for n in range(32)]

    async def all_wait() -> bool:
        return await stack.busy(pd) == 32

    await eventually(all_wait, "all requests wait for the embedding")
    encoder.engine.gate.set()
    answers = await asyncio.gather(*asking)
    assert [text_of(answer) for answer in answers] == [
        answer_text(f"request {n}", data) for n in range(32)
    ]
    assert encoder.engine.encoded.count(stack.key(data)) == 1
    after = await stack.counters(encoder)
    assert after["encoded"] == before.get("encoded", 0) + 1
    origins = sorted(answer.headers["x-epd-items"] for answer in answers)
    assert origins == ["encoded"] + ["shared"] * 31


async def test_fc37_duplicates_in_one_request_are_encoded_once(stack: ServiceStack) -> None:
    one, other = picture(), picture()
    response = await stack.ask("twice", one, other, one)
    assert text_of(response) == answer_text("twice", one, other, one)
    assert response.headers["x-epd-items"] == "encoded,encoded"
    assert stack.encoders[0].engine.encoded.count(stack.key(one)) == 1


async def test_a_known_picture_is_reused(stack: ServiceStack) -> None:
    data = picture()
    await stack.ask("first", data)
    response = await stack.ask("again", data)
    assert text_of(response) == answer_text("again", data)
    assert response.headers["x-epd-items"] == "reused"
    assert stack.encoders[0].engine.encoded.count(stack.key(data)) == 1


async def test_evicted_everywhere_it_is_encoded_again(stack: ServiceStack) -> None:
    data = picture()
    await stack.ask("first", data)
    await stack.forget(data)
    assert text_of(await stack.ask("again", data)) == answer_text("again", data)
    assert stack.encoders[0].engine.encoded.count(stack.key(data)) == 2


async def test_evicted_while_a_request_uses_it(stack: ServiceStack) -> None:
    data, pd = picture(), stack.pds[0]
    pd.engine.gate.clear()
    asking = asyncio.create_task(stack.ask("still", data))
    await eventually(lambda: bool(pd.engine.running), "the engine has the request")
    await stack.forget(data)
    pd.engine.gate.set()
    assert text_of(await asking) == answer_text("still", data)


async def test_evicted_from_the_arena_it_comes_from_redis(stack: ServiceStack) -> None:
    data = picture()
    await stack.ask("first", data)
    await stack.forget(data, redis=False)
    assert text_of(await stack.ask("again", data)) == answer_text("again", data)
    assert stack.encoders[0].engine.encoded.count(stack.key(data)) == 1


async def test_fc05_an_encoder_that_has_it_announces_it_again(stack: ServiceStack) -> None:
    data, encoder = picture(), stack.encoders[0]
    await stack.ask("first", data)
    before = await stack.counters(encoder)
    await stack.forget_state(data)
    await stack.forget(data, arena=False)
    assert text_of(await stack.ask("again", data)) == answer_text("again", data)
    after = await stack.counters(encoder)
    assert after["hits"] == before.get("hits", 0) + 1
    assert encoder.engine.encoded.count(stack.key(data)) == 1
    assert await stack.redis.exists(f"epd:v1:emb:{stack.key(data)}")  # and other nodes get it, too


async def test_text_needs_no_encoder(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    async with service_stack(nats_url, redis_url, tmp_path, encoders=0) as stack:
        assert text_of(await stack.ask("only text")) == "only text"
        response = await stack.http.post(
            "/v1/completions", json={"model": stack.model, "prompt": "raw"}
        )
        assert response.json()["choices"][0]["text"] == "raw"


async def test_text_never_touches_the_encoder(stack: ServiceStack) -> None:
    encoder = stack.encoders[0]
    encoder.engine.gate.clear()
    before = list(encoder.engine.encoded)
    response = await stack.ask("only text")
    assert text_of(response) == "only text"
    assert "x-epd-items" not in response.headers
    assert encoder.engine.encoded == before


async def test_across_nodes_by_redis_alone(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        await stack.add_encoder("node-a", stores=("redis",))
        await stack.add_pd("node-b", stores=("redis",))
        await stack.add_gateway()
        await stack.ready()
        data = picture()
        assert text_of(await stack.ask("far", data)) == answer_text("far", data)
        assert (await stack.counters(stack.pds[0]))["redis_fetches"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_fc29_a_body_above_the_bus_limit_travels_by_reference(
    stack: ServiceStack, stream: bool
) -> None:
    data, text = picture(), "long " * 400_000
    body = stack.body(text, data, stream=stream)
    response = await stack.http.post(CHAT, json=body)
    got = stream_text(response.text) if stream else text_of(response)
    assert got == answer_text(text, data)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_above_the_bus_limit(stack: ServiceStack, stream: bool) -> None:
    stack.pds[0].engine.padding = "pad " * 800_000
    body = stack.body("big", stream=stream)
    response = await stack.http.post(CHAT, json=body)
    got = stream_text(response.text) if stream else text_of(response)
    assert got == "big" + stack.pds[0].engine.padding


async def test_a_direct_job_with_an_inline_picture(stack: ServiceStack) -> None:
    data, inbox = picture(), await Inbox().listen(stack.bus)
    content = [{"type": "media_ref", "item": 0}, {"type": "text", "text": "direct"}]
    body = {"messages": [{"role": "user", "content": content}]}
    job = direct_job(
        stack, inbox, body=json.dumps(body).encode(), items=[Item(media=Media(inline=data))]
    )
    await publish(stack, "generate", encode(job))
    await eventually(lambda: len(inbox.frames) == 3, "head, data and end")
    head, piece, end = inbox.frames
    assert isinstance(head, ReplyHead)
    assert (head.status, head.worker, head.attempt) == (200, stack.pds[0].id, 1)
    assert isinstance(piece, ReplyData)
    assert json.loads(piece.data)["choices"][0]["message"]["content"] == answer_text("direct", data)
    assert isinstance(end, ReplyEnd)
    assert [frame.seq for frame in inbox.frames] == [0, 1, 2]


async def test_the_last_slots_are_filled_at_once(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """A worker that waits on all lanes must not keep slots for those that stay empty."""
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        pd = await stack.add_pd(pd_slots=8)
        await stack.add_gateway()
        await stack.ready()
        pd.engine.gate.clear()
        asking = [asyncio.create_task(stack.ask(f"request {n}")) for n in range(8)]
        await eventually(lambda: len(pd.engine.running) == 8, "all slots work", within_s=2.5)
        pd.engine.gate.set()
        assert [text_of(await task) for task in asking] == [f"request {n}" for n in range(8)]


# -- failures ---------------------------------------------------------------------------------------


async def test_an_encoder_that_fails_for_a_while(stack: ServiceStack) -> None:
    data = picture()
    stack.encoders[0].engine.failures = 2
    assert text_of(await stack.ask("at last", data)) == answer_text("at last", data)


async def test_fc24_a_picture_that_cannot_be_encoded_fails_alone(stack: ServiceStack) -> None:
    bad, good = picture(), picture()
    stack.encoders[0].engine.refuse = bad
    refused, answered = await asyncio.gather(stack.ask("bad", bad, good), stack.ask("good", good))
    assert text_of(answered) == answer_text("good", good)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["stage"], error["key"]) == (
        "cannot_encode",
        "encode",
        stack.key(bad),
    )


async def test_an_engine_with_a_bug_is_an_error_and_no_end(
    stack: ServiceStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_common.worker.UNEXPECTED_DELAY_S", 0.01)
    stack.pds[0].engine.crash = True
    response = await stack.ask("crash")
    assert response.status_code == 500
    assert response.json()["error"]["stage"] == "generate"
    assert len(set(stack.pds[0].engine.begun[-5:])) == 1  # five attempts, then given up
    stack.pds[0].engine.crash = False
    assert text_of(await stack.ask("fine")) == "fine"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"junk",
        b"\xc1",
        encode(Cancel(request_id="1")),
        b"\x83\xa1t\xa6encode\xa1v\x01\xa3key\x05",
        b"\x82\xa1t\xa6encode\xa1v\x63",
        encode(EncodeJob(key="../../etc", epoch=1, model="m", fingerprint="f", media=Media())),
    ],
)
async def test_malformed_encode_job(stack: ServiceStack, data: bytes) -> None:
    await publish(stack, "encode", data)
    letter = await dead_letter(stack, "encode", data)
    assert (letter.code, letter.worker) == ("malformed_message", stack.encoders[0].id)
    one = picture()
    assert text_of(await stack.ask("lives on", one)) == answer_text("lives on", one)


async def test_a_handler_with_a_bug_fills_no_queue(
    nats_url: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("epd_common.encode.EncodeHandler.handle", broken)
    monkeypatch.setattr("epd_common.worker.UNEXPECTED_DELAY_S", 0.01)
    async with service_stack(nats_url, redis_url, tmp_path) as stack:
        await publish(stack, "encode", b"a job")
        letter = await dead_letter(stack, "encode", b"a job")
        assert (letter.code, letter.attempts) == ("internal_error", 5)
        assert not stack.encoders[0].process.task.done()


def _wrong(inbox: Inbox, stack: ServiceStack, kind: str) -> bytes:
    good = direct_job(stack, inbox)
    fields: dict[str, Any] = {
        "t": "generate",
        "v": 1,
        "request_id": good.request_id,
        "model": stack.model,
        "inbox": inbox.subject,
        "body": good.body,
    }
    wrong = {"type": {"t": "cancel"}, "version": {"v": 99}, "field": {"items": 5}}
    wrong["deadline"] = {"deadline": float("nan")}
    return bytes(msgpack.packb(fields | wrong[kind]))


@pytest.mark.parametrize("kind", ["type", "version", "field", "deadline"])
async def test_malformed_generate_job(stack: ServiceStack, kind: str) -> None:
    inbox = await Inbox().listen(stack.bus)
    data = _wrong(inbox, stack, kind)
    await publish(stack, "generate", data)
    frame = await inbox.error()
    assert (frame.status, frame.code, frame.seq) == (400, "malformed_message", 0)
    letter = await dead_letter(stack, "generate", data)
    assert letter.reason == frame.message
    assert text_of(await stack.ask("lives on")) == "lives on"


@pytest.mark.parametrize("data", [b"", b"\xc1 junk", b"\x81\xa5inbox\xa3a *"])
async def test_malformed_generate_job_without_an_address(stack: ServiceStack, data: bytes) -> None:
    await publish(stack, "generate", data)
    assert (await dead_letter(stack, "generate", data)).code == "malformed_message"
    assert text_of(await stack.ask("lives on")) == "lives on"


async def test_an_inbox_that_is_no_subject(stack: ServiceStack) -> None:
    inbox = Inbox()
    inbox.subject = "a subject\r\nwith a break"
    data = encode(direct_job(stack, inbox))
    await publish(stack, "generate", data)
    assert (await dead_letter(stack, "generate", data)).code == "malformed_message"
    assert text_of(await stack.ask("lives on")) == "lives on"


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"route": "/v1/embeddings"}, 400, "unknown_route"),
        ({"body": b"{"}, 400, "invalid_json"),
        ({"body": b'{"temperature": NaN}'}, 400, "invalid_json"),
        ({"body": b"[]"}, 400, "invalid_json"),
        ({"body": b"", "body_ref": "gone"}, 503, "body_gone"),
        ({"deadline": 1.0}, 504, "deadline_exceeded"),
    ],
)
async def test_direct_job_that_cannot_be_answered(
    stack: ServiceStack, fields: dict[str, Any], status: int, code: str
) -> None:
    inbox = await Inbox().listen(stack.bus)
    await publish(stack, "generate", encode(direct_job(stack, inbox, **fields)))
    frame = await inbox.error()
    assert (frame.status, frame.code) == (status, code)
    if status == 504:
        assert frame.stage == "queue"


@pytest.mark.parametrize(
    "wrong",
    [{"image_grid_thw": [1, 130, 130]}, {}, {"image_grid_thw": "x"}, {"image_grid_thw": [-1]}, []],
)
async def test_a_wrong_forecast_is_never_the_answer(stack: ServiceStack, wrong: Any) -> None:
    """Not even where the engine refuses the prompt that was made of it."""
    (pd,), (encoder,) = stack.pds, stack.encoders
    pd.engine.refuses = wrong or None
    encoder.engine.gate.clear()
    encoder.engine.sizes = False
    one = picture()
    table = f"epd:v1:sizes:{stack.fingerprint}"
    await stack.redis.hset(table, "image:8x8:{}", msgspec.msgpack.encode(wrong))
    early = "a text that is long enough to be worth a step of the engine's before the picture"
    content = [{"type": "text", "text": early}, image_part(one)]
    body = {"model": stack.model, "messages": [{"role": "user", "content": content}]}
    asking = asyncio.create_task(stack.http.post(CHAT, json=body))
    await asyncio.sleep(0.3)
    assert not asking.done()
    encoder.engine.gate.set()
    assert text_of(await asking) == f"{early}{tag(one)} "


async def test_fc02_deadline_while_the_picture_is_encoded(stack: ServiceStack) -> None:
    data, encoder = picture(), stack.encoders[0].engine
    encoder.gate.clear()
    body, headers = stack.body("late", data), {"x-epd-deadline-s": "0.5"}
    response = await stack.http.post(CHAT, json=body, headers=headers)
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["code"], error["stage"], error["key"]) == (
        "deadline_exceeded",
        "encode",
        stack.key(data),
    )
    encoder.gate.set()
    assert text_of(await stack.ask("again", data)) == answer_text("again", data)


async def test_a_request_enters_before_its_last_picture(stack: ServiceStack) -> None:
    """Its size was announced before the encoder was done; the engine waits for the embedding itself."""
    first, second, pd, encoder = picture(), picture(), stack.pds[0], stack.encoders[0].engine
    await stack.ask("one is known", first)
    encoder.gate.clear()
    asking = asyncio.create_task(stack.ask("both", first, second))
    await eventually(lambda: len(pd.engine.running) == 1, "the request is inside the engine")
    assert stack.key(second) not in pd.pinned
    encoder.gate.set()
    assert text_of(await asking) == answer_text("both", first, second)
    assert pd.pinned == []


async def test_a_size_seen_before_needs_no_announcement(stack: ServiceStack) -> None:
    """The table of sizes forecasts it, although this encoder says nothing before it is done."""
    first, second, pd, encoder = picture(), picture(), stack.pds[0], stack.encoders[0].engine
    await stack.ask("the size is known", first)
    encoder.sizes = False
    encoder.gate.clear()
    asking = asyncio.create_task(stack.ask("both", first, second))
    await eventually(lambda: len(pd.engine.running) == 1, "the request is inside the engine")
    encoder.gate.set()
    assert text_of(await asking) == answer_text("both", first, second)
    encoder.sizes = True


async def test_fc19_a_wrong_forecast_is_mended(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """The table promises another grid than the embedding has: the prompt is made anew, and right."""
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        encoding = await stack.add_encoder()
        pd = await stack.add_pd()
        await stack.add_gateway()
        await stack.ready()
        encoder, data = encoding.engine, picture()
        width, height = Image.open(io.BytesIO(data)).size
        table = SizeTable(stack.redis, stack.fingerprint)
        await table.add("image", width, height, {}, {"image_grid_thw": [1, 2, 2]}, 1)
        encoder.sizes = False
        encoder.gate.clear()
        text = "text comes first, so much of it that it pays to begin with it at once. " * 2
        body = stack.body("after", data)
        body["messages"].insert(0, {"role": "system", "content": text})
        asking = asyncio.create_task(stack.http.post(CHAT, json=body))
        await eventually(lambda: len(pd.engine.running) == 1, "the request is inside the engine")
        encoder.gate.set()
        assert answer_text("after", data) in text_of(await asking)
        assert (await stack.counters(pd))["wrong_forecasts"] == 1
        assert len(pd.engine.begun) == 2


@pytest.mark.parametrize("deadline", [0.0, 4_000_000_000.0, 1e308])
async def test_fc39_a_job_without_a_deadline_or_with_a_late_one_has_the_default_one(
    nats_url: str, redis_url: str, tmp_path: Path, deadline: float
) -> None:
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        encoder = await stack.add_encoder()
        await stack.add_pd(deadline_s=0.5)
        await stack.add_gateway()
        await stack.ready()
        encoder.engine.gate.clear()
        inbox = await Inbox().listen(stack.bus)
        content = [{"type": "media_ref", "item": 0}, {"type": "text", "text": "direct"}]
        body = {"messages": [{"role": "user", "content": content}]}
        items = [Item(media=Media(inline=picture()))]
        job = direct_job(
            stack, inbox, body=json.dumps(body).encode(), items=items, deadline=deadline
        )
        await publish(stack, "generate", encode(job))
        frame = await inbox.error()
        assert (frame.status, frame.stage) == (504, "encode")
        encoder.engine.gate.set()


async def test_an_encode_job_of_an_older_epoch_is_dropped(stack: ServiceStack) -> None:
    data, encoder = picture(), stack.encoders[0]
    key, before = stack.key(data), (await stack.counters(encoder)).get("stale", 0)
    states = KeyStates(stack.redis, lease_s=60, ready_ttl_s=60)
    (old,) = await states.claim([key])
    (new,) = await states.claim([key], useless={key: old.epoch})
    assert new.epoch > old.epoch
    job = EncodeJob(
        key=key,
        epoch=old.epoch,
        model=stack.model,
        fingerprint=stack.fingerprint,
        media=Media(inline=data),
    )
    await publish(stack, "encode", encode(job))

    async def dropped() -> bool:
        return (await stack.counters(encoder)).get("stale", 0) == before + 1

    await eventually(dropped, "the job is dropped")
    assert key not in encoder.engine.encoded


async def test_fc02_deadline_while_the_engine_answers(stack: ServiceStack) -> None:
    data, encoder, pd = picture(), stack.encoders[0].engine, stack.pds[0].engine
    pd.gate.clear()
    encoder.gate.clear()
    started = time.monotonic()
    headers = {"x-epd-deadline-s": "1"}
    asking = asyncio.create_task(
        stack.http.post(CHAT, json=stack.body("late", data), headers=headers)
    )
    await eventually(lambda: time.monotonic() - started > 0.5, "half of the time is over")
    encoder.gate.set()
    await eventually(lambda: bool(pd.running), "the engine has it")
    response = await asking
    assert response.status_code == 504
    # The worker's word, not the gateway's a moment later: the wait for the embedding is part of the
    # time, not on top of it.
    assert "was being generated" in response.json()["error"]["message"]
    await eventually(lambda: bool(pd.closed) and not pd.running, "the engine's request is closed")
    assert time.monotonic() - started < 1.5


async def test_fc02_deadline_in_the_queue(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        pd = await stack.add_pd(pd_slots=1)
        await stack.add_gateway()
        await stack.ready()
        pd.engine.gate.clear()
        first = asyncio.create_task(stack.ask("first"))
        await eventually(lambda: bool(pd.engine.running), "the one slot is taken")
        headers = {"x-epd-deadline-s": "0.3"}
        late = await stack.http.post(CHAT, json=stack.body("late"), headers=headers)
        assert late.status_code == 504
        assert late.json()["error"]["stage"] == "generate"
        pd.engine.gate.set()
        assert text_of(await first) == "first"
        assert text_of(await stack.ask("next")) == "next"
        assert len(pd.engine.begun) == 2  # the late one never began


@pytest.mark.parametrize("status", [400, 404, 422, 500])
async def test_fc24_errors_of_the_engine_pass_through(stack: ServiceStack, status: int) -> None:
    stack.pds[0].engine.status = status
    response = await stack.ask("no")
    assert response.status_code == status
    assert response.json()["error"]["code"] == "engine_says_no"


# -- cancelling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["message", "disconnect"])
@pytest.mark.parametrize("stream", [False, True])
async def test_fc35_cancel_while_the_engine_answers(
    stack: ServiceStack, how: str, stream: bool
) -> None:
    data, pd = picture(), stack.pds[0]
    pd.engine.gate.clear()
    asking = asyncio.create_task(
        stack.http.post(CHAT, json=stack.body("never", data, stream=stream))
    )
    await eventually(lambda: bool(pd.engine.running), "the engine has the request")
    (request_id,) = pd.engine.running
    assert pd.pinned == [stack.key(data)]
    await _cancel(stack, how, request_id, asking)
    took_s = await eventually(lambda: request_id in pd.engine.closed, "the generator is closed")
    took_s += await eventually(lambda: pd.pinned == [], "the pins are released")
    assert took_s < CANCEL_BOUND_S
    if how == "message":
        response = await asking
        assert "cancelled" in response.text
        assert response.status_code == (200 if stream else 499)
    else:
        await _open_requests(stack, 0)


@pytest.mark.parametrize("how", ["message", "disconnect"])
async def test_fc35_cancel_while_the_picture_is_encoded(stack: ServiceStack, how: str) -> None:
    ready, cold = picture(), picture()
    encoder, pd = stack.encoders[0], stack.pds[0]
    await stack.ask("warm", ready)
    before = (await stack.counters(pd)).get("cancelled", 0)
    encoder.engine.gate.clear()
    asking = asyncio.create_task(stack.ask("never", ready, cold))
    await eventually(lambda: pd.pinned == [stack.key(ready)], "it waits for the other one")
    letters: list[str] = []

    async def note(message: Msg) -> None:
        letters.append(message.subject)

    await stack.bus.subscribe(subjects.cancel_subject("*"), note)
    await stack.bus.flush()
    job = await _generate_job_of(stack)
    await _cancel(stack, how, job, asking)

    async def cancelled() -> bool:
        return (await stack.counters(pd)).get("cancelled", 0) == before + 1

    took_s = await eventually(cancelled, "it is cancelled")
    took_s += await eventually(lambda: pd.pinned == [], "the pins are released")
    assert took_s < CANCEL_BOUND_S
    if how == "message":
        assert (await asking).status_code == 499
    encoder.engine.gate.set()
    assert text_of(await stack.ask("next", cold)) == answer_text("next", cold)


async def _generate_job_of(stack: ServiceStack) -> str:
    """Id of the one request that runs, from the queue."""
    subject = subjects.generate_subject(stack.model, "l0")
    raw = await stack.bus.js.get_last_msg(subjects.GENERATE_STREAM, subject)
    return decode(raw.data or b"", GenerateJob).request_id


async def _cancel(
    stack: ServiceStack, how: str, request_id: str, asking: asyncio.Task[httpx.Response]
) -> None:
    if how == "message":
        message = Cancel(request_id=request_id)
        await stack.bus.emit(subjects.cancel_subject(request_id), message)
    else:
        asking.cancel()
        await asyncio.wait((asking,))


async def _open_requests(stack: ServiceStack, count: int) -> None:
    async def so_many() -> bool:
        metrics = (await stack.http.get("/metrics")).text
        return f"\nepd_gateway_open_requests {float(count)}\n" in metrics

    await eventually(so_many, f"the gateway has {count} open requests")


async def test_cancel_that_overtakes_its_job(stack: ServiceStack) -> None:
    inbox = await Inbox().listen(stack.bus)
    job = direct_job(stack, inbox)
    cancel = Cancel(request_id=job.request_id)
    await stack.bus.emit(subjects.cancel_subject(job.request_id), cancel)
    await stack.bus.flush()
    await publish(stack, "generate", encode(job))
    assert (await inbox.error()).code == "cancelled"
    assert job.request_id not in stack.pds[0].engine.begun


async def test_a_client_that_leaves_in_a_stream(stack: ServiceStack) -> None:
    pd = stack.pds[0]
    pd.engine.gate.clear()
    async with stack.streaming("never") as response:
        await anext(response.aiter_bytes())
        (request_id,) = pd.engine.running
    took_s = await eventually(lambda: request_id in pd.engine.closed, "the generator is closed")
    assert took_s < CANCEL_BOUND_S
    await _open_requests(stack, 0)


# -- bounds -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def own_brokers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Brokers]:
    """Brokers whose streams may be made small."""
    async with embedded_brokers(tmp_path_factory.mktemp("small")) as running:
        yield running


async def test_fc22_full_queue_answers_429(own_brokers: Brokers, tmp_path: Path) -> None:
    async with bare_stack(own_brokers.nats_url, own_brokers.redis_url, tmp_path) as stack:
        await stack.add_encoder(queue_max_jobs=2)
        pd = await stack.add_pd(pd_slots=1, queue_max_jobs=2)
        await stack.add_gateway(queue_max_jobs=2)
        await stack.ready()
        pd.engine.gate.clear()
        running = asyncio.create_task(stack.ask("runs"))
        await eventually(lambda: bool(pd.engine.running), "the one slot is taken")
        waiting = asyncio.create_task(stack.ask("waits"))

        async def full() -> bool:
            info = await stack.bus.js.stream_info(subjects.GENERATE_STREAM)
            return bool(info.state.messages == 2)

        await eventually(full, "the queue is full")
        data = picture()
        for refused in (await stack.ask("too many"), await stack.ask("too many", data)):
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
        pd.engine.gate.set()
        assert [text_of(answer) for answer in (await running, await waiting)] == ["runs", "waits"]
        assert text_of(await stack.ask("later", data)) == answer_text("later", data)


async def test_full_queue_of_encode_jobs(own_brokers: Brokers, tmp_path: Path) -> None:
    async with bare_stack(own_brokers.nats_url, own_brokers.redis_url, tmp_path) as stack:
        encoder = await stack.add_encoder(encoder_slots=1, queue_max_jobs=2)
        await stack.add_pd(queue_max_jobs=2)
        await stack.add_gateway(queue_max_jobs=2)
        await stack.ready()
        encoder.engine.gate.clear()
        pictures = [picture() for _ in range(3)]
        refused = await stack.ask("three", *pictures)
        assert refused.status_code == 429
        encoder.engine.gate.set()
        answer = await stack.ask("two", *pictures[:2])
        assert text_of(answer) == answer_text("two", *pictures[:2])
        # The one that was not taken is nobody's: the next request may order it.
        assert text_of(await stack.ask("third", pictures[2])) == answer_text("third", pictures[2])


async def test_an_answer_that_nobody_reads_is_bounded(
    stack: ServiceStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_common.replies.reply.BUFFER_BYTES", 1000)
    async with ReplyHub(stack.bus) as hub, hub.expect("r1", timeout_s=BOUND_S) as reply:
        inbox = Frames(stack.bus, reply.inbox)
        await inbox.head()
        assert (await reply.head()).status == 200
        cancelled = await _cancels_of(stack, "r1")
        for _ in range(5):
            await inbox.data(b"x" * 300)
        await eventually(lambda: bool(cancelled), "whoever answers is told to stop")
        got = []
        with pytest.raises(UpstreamError) as caught:
            async for piece in reply.data():
                got.append(piece)
        assert caught.value.code == "reader_too_slow"
        assert len(b"".join(got)) <= 1000 + 300


async def test_a_client_that_stops_to_read_is_let_go(
    stack: ServiceStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_gateway.app.SEND_GRACE_S", 0.3)
    stack.pds[0].engine.padding = "x" * 12_000_000  # more than sockets hold
    url = stack.http.base_url
    body = json.dumps(stack.body("big", stream=True)).encode()
    reader, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
    request = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"x-epd-deadline-s: 0.7\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(request.encode() + body)
    assert b"200" in await reader.readline()
    await _open_requests(stack, 1)
    await _open_requests(stack, 0)
    writer.close()


# -- frames ---------------------------------------------------------------------------------------------


class Frames:
    """Sends frames of a reply as a PD worker would, and some as it would not."""

    def __init__(self, bus: Bus, inbox: str) -> None:
        self._bus = bus
        self._inbox = inbox
        self.seq = 0
        self.attempt = 1

    def _next(self) -> dict[str, Any]:
        self.seq += 1
        return {"request_id": "r1", "attempt": self.attempt, "seq": self.seq - 1}

    async def head(self, **fields: Any) -> None:
        head = ReplyHead(**self._next(), **{"status": 200, "content_type": EVENT_STREAM} | fields)
        await self._bus.emit(self._inbox, head)

    async def data(self, data: bytes) -> None:
        await self._bus.emit(self._inbox, ReplyData(**self._next(), data=data))

    async def end(self) -> None:
        await self._bus.emit(self._inbox, ReplyEnd(**self._next()))

    async def new_attempt(self) -> None:
        self.attempt += 1
        self.seq = 0


async def _cancels_of(stack: ServiceStack, request_id: str) -> list[Msg]:
    found: list[Msg] = []

    async def note(message: Msg) -> None:
        found.append(message)

    await stack.bus.subscribe(subjects.cancel_subject(request_id), note)
    await stack.bus.flush()
    return found


async def _all_data(reply: Reply) -> bytes:
    async with asyncio.timeout(BOUND_S):
        return b"".join([piece async for piece in reply.data()])


@pytest.fixture
async def expected(stack: ServiceStack) -> AsyncIterator[tuple[Reply, Frames]]:
    async with ReplyHub(stack.bus) as hub, hub.expect("r1", timeout_s=BOUND_S) as reply:
        yield reply, Frames(stack.bus, reply.inbox)


async def test_fc23_frames_of_an_older_attempt_are_dropped(expected: tuple[Reply, Frames]) -> None:
    reply, worker = expected
    lost = Frames(worker._bus, reply.inbox)
    await lost.head()
    await worker.new_attempt()
    await worker.head()
    await lost.data(b"old")
    await worker.data(b"new")
    await lost.end()
    await worker.data(b"er")
    await worker.end()
    assert (await reply.head()).attempt == 2
    assert await _all_data(reply) == b"newer"


@pytest.mark.parametrize(
    "fields",
    [
        {"status": 0},
        {"status": 101},
        {"status": 99_999},
        {"content_type": f"{EVENT_STREAM}\r\nset-cookie: a=b"},
        {"content_type": f"{EVENT_STREAM}; \u4f60"},
        {"content_type": f"{EVENT_STREAM}; {'x' * 100_000}"},
        {"worker": "\u4f60"},
        {"worker": "w" * 100_000},
        {"worker": "w\r\nset-cookie: a=b"},
    ],
)
async def test_a_head_that_cannot_be_one_is_an_error(
    expected: tuple[Reply, Frames], fields: dict[str, Any]
) -> None:
    """Put into an HTTP answer it would cost the client the connection, with no word why."""
    reply, worker = expected
    await worker.head(**fields)
    with pytest.raises(UpstreamError, match="the head of the answer is none"):
        await reply.head()


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e300])
async def test_a_wait_that_cannot_be_is_not_asked_of_clients(
    expected: tuple[Reply, Frames], seconds: float
) -> None:
    reply, worker = expected
    names = {"request_id": "r1", "attempt": 1, "seq": 0}
    error = ReplyError(**names, status=500, code="c", message="m", retry_after_s=seconds)
    await worker._bus.emit(reply.inbox, error)
    with pytest.raises(EpdError) as raised:
        await reply.head()
    assert raised.value.headers() == {}


async def test_doubled_frames_count_once(expected: tuple[Reply, Frames]) -> None:
    reply, worker = expected
    await worker.head()
    await worker.data(b"once")
    worker.seq -= 1
    await worker.data(b"once")
    await worker.end()
    await reply.head()
    assert await _all_data(reply) == b"once"


async def test_a_gap_that_nobody_fills_is_an_error(
    stack: ServiceStack, expected: tuple[Reply, Frames], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("hub", "reply"):
        monkeypatch.setattr(f"epd_common.replies.{module}.LOOK_S", 0.02)
    monkeypatch.setattr("epd_common.replies.reply.ASKED_TIMES", 3)
    reply, worker = expected
    reply.submitted = True
    cancelled = await _cancels_of(stack, "r1")
    await worker.head()
    worker.seq += 1
    await worker.data(b"after the gap")
    await reply.head()
    with pytest.raises(UpstreamError) as caught:
        await _all_data(reply)
    assert caught.value.code == "reply_gap"
    await eventually(lambda: bool(cancelled), "whoever answers is told to stop")


async def test_another_attempt_after_the_answer_began_is_an_error(
    expected: tuple[Reply, Frames],
) -> None:
    reply, worker = expected
    await worker.head()
    await reply.head()
    await worker.new_attempt()
    await worker.head()
    with pytest.raises(UpstreamError) as caught:
        await _all_data(reply)
    assert caught.value.code == "worker_lost"


async def test_junk_in_an_inbox_is_dropped(expected: tuple[Reply, Frames]) -> None:
    reply, worker = expected
    await worker.head()
    for junk in (b"", b"\xc1", encode(EmbeddingEvent(key="k", epoch=1, state="ready"))):
        await worker._bus.emit_bytes(reply.inbox, junk)
    await worker.end()
    await reply.head()
    assert await _all_data(reply) == b""


async def test_fc39_no_frame_at_all_ends_with_the_deadline(stack: ServiceStack) -> None:
    async with ReplyHub(stack.bus) as hub, hub.expect("r1", timeout_s=0.1) as reply:
        with pytest.raises(EpdError) as caught:
            await reply.head()
    assert (caught.value.status, caught.value.stage) == (504, "generate")


# -- workers that come and go ---------------------------------------------------------------------------


async def test_drain_finishes_what_runs_and_leaves_the_rest(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        leaving = await stack.add_pd(pd_slots=2)
        await stack.add_gateway()
        await stack.ready()
        leaving.engine.gate.clear()
        running = [asyncio.create_task(stack.ask(f"runs {n}")) for n in range(2)]
        await eventually(lambda: len(leaving.engine.running) == 2, "both slots are taken")
        queued = asyncio.create_task(stack.ask("queued"))
        other = await stack.add_pd()
        await stack.ready()
        answer = await queued
        assert answer.headers["x-epd-worker"] == other.id
        leaving.process.terminate()
        await eventually(
            lambda: all(
                record.worker != leaving.id for record in stack.registry.ready("pd", stack.model)
            ),
            "the leaving worker is not ready",
        )
        answer = await stack.ask("new")
        assert answer.headers["x-epd-worker"] == other.id
        assert not leaving.process.task.done()
        leaving.engine.gate.set()
        assert [text_of(await task) for task in running] == ["runs 0", "runs 1"]
        await asyncio.wait_for(leaving.process.task, BOUND_S)
        assert leaving.engine.closed == []
        assert leaving.pinned == [] if (leaving.arena / "pins" / leaving.id).exists() else True


async def test_what_does_not_finish_within_the_drain_goes_to_another(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        await stack.add_encoder()
        leaving = await stack.add_pd(drain_s=0.1)
        await stack.add_gateway()
        await stack.ready()
        leaving.engine.gate.clear()
        data = picture()
        asking = asyncio.create_task(stack.ask("moves", data))
        await eventually(lambda: bool(leaving.engine.running), "it has the request")
        other = await stack.add_pd()
        await stack.ready()
        await leaving.process.stop()
        answer = await asking
        assert text_of(answer) == answer_text("moves", data)
        assert answer.headers["x-epd-worker"] == other.id
        assert len(leaving.engine.closed) == 1


async def test_fc21_an_encoder_that_dies_leaves_its_jobs_to_another(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with service_stack(nats_url, redis_url, tmp_path) as stack:
        dying = stack.encoders[0]
        dying.engine.gate.clear()
        pictures = [picture() for _ in range(4)]
        asking = asyncio.create_task(stack.ask("seen", *pictures))
        await eventually(lambda: len(dying.engine.encoded) == 4, "it has the jobs")
        await stack.add_encoder()
        await stack.ready()
        dying.engine.die()
        assert text_of(await asking) == answer_text("seen", *pictures)
        assert len(dying.engine.encoded) == 4  # it took none of them again
        assert "reordered" not in await stack.counters(stack.pds[0])  # and called none a failure
        await _died(dying)


async def test_a_pd_worker_that_dies_before_its_answer_began(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        dying = await stack.add_pd()
        await stack.add_gateway()
        await stack.ready()
        dying.engine.gate.clear()
        asking = asyncio.create_task(stack.ask("moves"))
        await eventually(lambda: bool(dying.engine.running), "it has the request")
        other = await stack.add_pd()
        await stack.ready()
        dying.engine.die()
        answer = await asking
        assert text_of(answer) == "moves"
        assert answer.headers["x-epd-worker"] == other.id
        await _died(dying)


async def test_a_pd_worker_that_dies_in_a_stream_with_which_nobody_can_go_on(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with service_stack(nats_url, redis_url, tmp_path, encoders=0) as stack:
        dying = stack.pds[0]
        dying.engine.gate.clear()
        async with stack.streaming("never", n=2) as response:
            pieces = response.aiter_text()
            seen = await anext(pieces)
            dying.engine.die()
            seen += "".join([piece async for piece in pieces])
        *_, event, mark, rest = seen.split("\n\n")
        assert (mark, rest) == ("data: [DONE]", "")
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == "worker_lost"
        await _died(dying)


async def _died(worker: Worker) -> None:
    await asyncio.wait((worker.process.task,), timeout=BOUND_S)
    with pytest.raises(UpstreamError, match="engine died"):
        worker.process.task.result()


def test_digest_of_the_fake_is_that_of_the_picture() -> None:
    data = picture()
    assert answer_text("x", data) == f"{digest(data)[:12]} x"


async def test_fc13_a_job_with_anothers_picture_is_refused(stack: ServiceStack) -> None:
    """A key names its bytes: nobody puts other bytes under it (field cases 13 and 23)."""
    mine, other, encoder = picture(), picture(), stack.encoders[0]
    states = KeyStates(stack.redis, lease_s=60, ready_ttl_s=60)
    (claim,) = await states.claim([stack.key(mine)])
    forged = EncodeJob(
        key=stack.key(mine),
        epoch=claim.epoch,
        model=stack.model,
        fingerprint=stack.fingerprint,
        media=Media(inline=other),
    )
    await publish(stack, "encode", encode(forged))
    assert text_of(await stack.ask("whose", mine)) == answer_text("whose", mine)
    assert encoder.engine.encoded.count(stack.key(mine)) == 1


async def test_lost_media_of_another_job_do_not_fail_who_has_them(stack: ServiceStack) -> None:
    data = picture()
    states = KeyStates(stack.redis, lease_s=60, ready_ttl_s=60)
    (claim,) = await states.claim([stack.key(data)])
    job = EncodeJob(
        key=stack.key(data),
        epoch=claim.epoch,
        model=stack.model,
        fingerprint=stack.fingerprint,
        media=Media(ref="0" * 64),
    )
    await publish(stack, "encode", encode(job))
    assert text_of(await stack.ask("mine are here", data)) == answer_text("mine are here", data)


async def test_fc22_a_second_request_with_a_running_ones_id_is_refused(stack: ServiceStack) -> None:
    first, second = await Inbox().listen(stack.bus), await Inbox().listen(stack.bus)
    pd = stack.pds[0].engine
    pd.gate.clear()
    job = direct_job(stack, first)
    await publish(stack, "generate", encode(job))
    await eventually(lambda: job.request_id in pd.running, "the first runs")
    again = direct_job(stack, second, request_id=job.request_id)
    await publish(stack, "generate", encode(again))
    assert (await second.error()).status == 409
    pd.gate.set()
    await eventually(lambda: len(first.frames) == 3, "the first ends well")
    assert isinstance(first.frames[-1], ReplyEnd)


@pytest.mark.parametrize(
    "fields",
    [
        {"inbox": "x" * 70_000},
        {"inbox": "$KV.epd_workers.pd.pd-1"},
        {"inbox": "epd.v1.generate.x.l0.any"},
        {"request_id": ""},
        {"request_id": "a.b"},
        {"request_id": "x" * 200},
        {"model": "another"},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_jobs_with_wrong_names_go_to_the_dead_letters(
    stack: ServiceStack, fields: dict[str, Any]
) -> None:
    inbox = await Inbox().listen(stack.bus)
    data = encode(msgspec.structs.replace(direct_job(stack, inbox), **fields))
    await publish(stack, "generate", data)
    letter = await dead_letter(stack, "generate", data)
    assert letter.code == "malformed_message"
    one = picture()
    assert text_of(await stack.ask("lives on", one)) == answer_text("lives on", one)


async def test_a_picture_that_kills_engines_is_not_handed_on(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """After the second engine died of it, it is refused; a third engine never sees it."""
    async with service_stack(nats_url, redis_url, tmp_path) as stack:
        data = picture()
        first = stack.encoders[0]
        second, third = await stack.add_encoder(), await stack.add_encoder()
        await stack.ready()
        for encoder in (first, second, third):
            encoder.engine.gate.clear()
        asking = asyncio.create_task(stack.ask("deadly", data))
        victims: list[Any] = []

        def has_it() -> bool:
            for encoder in (first, second, third):
                if encoder not in victims and stack.key(data) in encoder.engine.encoded:
                    victims.append(encoder)
                    encoder.engine.die()
            return len(victims) == 2

        await eventually(has_it, "two engines died of it")
        response = await asking
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "media_kills_engine"
        (survivor,) = (e for e in (first, second, third) if e not in victims)
        assert stack.key(data) not in survivor.engine.encoded
        for victim in victims:
            with pytest.raises(UpstreamError, match="engine died"):
                await victim.process.task
        survivor.engine.gate.set()
        one = picture()
        assert text_of(await stack.ask("the rest", one)) == answer_text("the rest", one)


@pytest.mark.slow
async def test_fc09_what_a_full_arena_refuses_leaves_nothing_behind(
    stack: ServiceStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, refused = stack.encoders[0], picture()

    def full(*_: object) -> None:
        raise StoreFullError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("epd_common.store.arena.Arena.adopt", full)
        response = await stack.ask("no room", refused)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "store_full")
    assert list((encoder.arena / "staging" / encoder.id).iterdir()) == []
    assert text_of(await stack.ask("room again", refused)) == answer_text("room again", refused)
