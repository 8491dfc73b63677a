"""Field cases (docs/field-cases.md) that no other test shows; a test's name begins with its case's number.

Real brokers; only the model is a fake, or nothing but time.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis.asyncio
from nats.aio.msg import Msg
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from direct import Inbox, direct_job, publish
from epd_cli.brokers import embedded_brokers
from epd_common.bus import Bus, Delivery
from epd_common.health import ask_health
from epd_common.ingest import FetchedMedia, Ingest, IngestLimits, PictureChecker
from epd_common.ingest.body import CHAT, RESPONSES
from epd_common.ingest.contents import PROMPT_FIELDS
from epd_common.ingest.data_uri import make_data_uri
from epd_common.protocol import (
    EmbeddingEvent,
    Item,
    Media,
    decode,
    subjects,
)
from epd_common.protocol.codec import encode
from epd_common.protocol.keys import digest
from epd_common.store import (
    Arena,
    Embedding,
    KeyStates,
    MediaStore,
    RedisEmbeddingStore,
)
from epd_common.store.embedding import pack_header, payload_checksum
from epd_common.store.shared_connection import SharingRedis
from epd_gateway.app import GENERATE_ROUTES
from epd_pd.answering import ROUTES
from epd_pd.settings import PdSettings
from epd_sim.profiles import PROFILES
from fake_engine import FakePdEngine, answer_text, header, payload
from service_stack import (
    ServiceStack,
    Worker,
    bare_stack,
    eventually,
    image_part,
    picture,
    service_stack,
    text_of,
)

NOBODY = "0" * 64


@pytest.fixture
async def bare(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    """Nothing but connections."""
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        yield stack


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    """One encoder and one PD worker."""
    async with service_stack(nats_url, redis_url, tmp_path) as running:
        yield running


async def started(stack: ServiceStack) -> None:
    await stack.add_gateway()
    await stack.ready()


async def ready_events(stack: ServiceStack) -> list[EmbeddingEvent]:
    """What is announced from now on."""
    seen: list[EmbeddingEvent] = []

    async def note(message: Msg) -> None:
        seen.append(decode(message.data, EmbeddingEvent))

    await stack.bus.subscribe(subjects.ready_subject("*"), note)
    await stack.bus.flush()
    return seen


async def metrics(stack: ServiceStack) -> dict[tuple[str, str], float]:
    """The gateway's metrics, by name and the values of their labels, which are in the order of theirs."""
    text = (await stack.http.get("/metrics")).text
    return {
        (sample.name, ",".join(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# -- embeddings: whole, right, and the one that was asked for --------------------------------------


async def test_fc01_written_and_verified_before_it_is_announced(
    stack: ServiceStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def note(owner: Any, name: str, step: str) -> None:
        """Have it noted when a method has returned."""
        method = getattr(owner, name)

        def plain(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            steps.append(step)
            return result

        async def awaited(*args: Any, **options: Any) -> Any:
            result = await method(*args, **options)
            steps.append(step)
            return result

        chosen = awaited if asyncio.iscoroutinefunction(method) else plain
        monkeypatch.setattr(owner, name, chosen)

    emit = Bus.emit

    async def emitted(bus: Bus, subject: str, message: Any) -> None:
        if isinstance(message, EmbeddingEvent) and message.state == "ready":
            steps.append("announced")
        await emit(bus, subject, message)

    note(Arena, "adopt", "written here")
    note(RedisEmbeddingStore, "put", "written for other nodes")
    note(KeyStates, "finish", "recorded")
    monkeypatch.setattr(Bus, "emit", emitted)
    note(Delivery, "ack", "acknowledged")
    data = picture()
    assert text_of(await stack.ask("x", data)) == answer_text("x", data)
    of_the_encode = steps[: steps.index("acknowledged") + 1]
    assert of_the_encode == [
        "written here",
        "written for other nodes",
        "recorded",
        "announced",
        "acknowledged",
    ]


async def test_fc08_stale_and_doubled_completions_change_nothing(stack: ServiceStack) -> None:
    (encoder,), (pd,) = stack.encoders, stack.pds
    encoder.engine.gate.clear()
    encoder.engine.sizes = False
    pictures = [picture() for _ in range(3)]
    asking = [asyncio.create_task(stack.ask(f"{n}", data)) for n, data in enumerate(pictures)]
    both = asyncio.create_task(stack.ask("all", *pictures))

    async def all_wait() -> bool:
        return await stack.busy(pd) == 4 and len(encoder.engine.encoded) == 3

    await eventually(all_wait, "all wait for their embeddings")
    states = KeyStates(stack.redis, lease_s=60, ready_ttl_s=60)
    key = stack.key(pictures[0])
    (claim,) = await states.claim([key])
    stale = [
        EmbeddingEvent(key=key, epoch=claim.epoch - 1, state="failed", status=400, code="stale"),
        EmbeddingEvent(key=key, epoch=claim.epoch - 1, state="ready", rows=1),
    ]
    for event in stale:
        await stack.bus.emit(subjects.ready_subject(key), event)
        assert not await states.finish(event)
    await stack.bus.flush()
    seen = await ready_events(stack)
    encoder.engine.gate.set()
    await eventually(lambda: len(seen) == 3, "all are announced")
    for event in seen[:3]:
        await stack.bus.emit(subjects.ready_subject(event.key), event)
    for n, data in enumerate(pictures):
        assert text_of(await asking[n]) == answer_text(f"{n}", data)
    assert text_of(await both) == answer_text("all", *pictures)
    assert not {"lost", "reordered", "gave_up"} & set(await stack.counters(pd))


@pytest.mark.parametrize("changes", [{"rows": 3}, {"width": 4}, {"dtype": "bfloat16"}], ids=str)
async def test_fc15_rows_width_and_dtype_are_checked_before_the_engine_sees_it(
    stack: ServiceStack, changes: dict[str, Any]
) -> None:
    """The file is whole, and its checksum right; only it is not what the model takes, or was told of."""
    (encoder,), (pd,), data = stack.encoders, stack.pds, picture()
    await stack.ask("first", data)
    head = msgspec.structs.replace(header(stack.key(data), data, stack.fingerprint), **changes)
    values = payload(data)[: head.payload_bytes]
    head = msgspec.structs.replace(head, checksum=payload_checksum(values))
    await stack.forget(data)
    written = pd.arena / "staging" / pd.id / "unfit"
    written.write_bytes(pack_header(head) + values)
    written.rename(pd.arena / "data" / stack.key(data))
    assert text_of(await stack.ask("again", data)) == answer_text("again", data)
    assert (await stack.counters(pd))["integrity_faults"] == 1
    assert encoder.engine.encoded.count(stack.key(data)) == 2


async def test_fc34_keys_that_differ_in_their_last_character_are_two(
    redis_url: str, tmp_path: Path
) -> None:
    """In every store, and in the table of states."""
    begin = secrets.token_hex(32)[:-1]
    keys = [f"{begin}0", f"{begin}1"]
    arena = Arena(tmp_path, quota_bytes=1 << 20, worker="w")
    arena.open()
    async with redis.asyncio.from_url(redis_url) as client:
        states = KeyStates(client, lease_s=60, ready_ttl_s=60)
        assert [claim.state for claim in await states.claim(keys)] == ["claimed"] * 2
        for store in (arena, RedisEmbeddingStore(client, ttl_s=60)):
            for key in keys:
                head = header(key, key.encode(), "f" * 64)
                await store.put(Embedding(head, memoryview(payload(key.encode()))))
            for key in keys:
                found = await store.get(key)
                assert found is not None
                assert bytes(found.payload) == payload(key.encode())
    arena.close()


async def test_fc36_a_changed_picture_behind_one_url_is_another_item() -> None:
    """And the same bytes behind two URLs are one."""
    one, other = picture(), picture()
    web = {"https://a.example/x": one, "https://b.example/y": one}

    class Stored:
        async def put(self, data: bytes, *, digest: str, content_type: str, owner: str) -> str:
            return digest

    async def fetch(url: str, place: str, *, owner: str = "") -> FetchedMedia:
        return FetchedMedia(web[url], "image/png")

    async def digests() -> list[str]:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in web]
        prepared = await ingest.prepare(
            route=CHAT,
            body={"messages": [{"role": "user", "content": parts}]},
            fingerprint="f" * 64,
            scope="",
            special_tokens=(),
            modalities=("image",),
        )
        return [item.digest for item in prepared.items]

    async with PictureChecker(IngestLimits(decode_workers=1)) as checker:
        ingest = Ingest(Stored(), checker, IngestLimits(), fetch)
        assert await digests() == [digest(one)]
        web["https://a.example/x"] = other
        assert await digests() == [digest(other), digest(one)]


# -- streams, routes, deadlines ----------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "status"), [("body", 400), ("encode", 400), ("engine", 422)])
async def test_fc03_a_stream_that_cannot_begin_has_its_own_status(
    stack: ServiceStack, fault: str, status: int
) -> None:
    data = picture()
    body = stack.body("x", data, stream=True)
    if fault == "body":
        body["messages"][0]["content"].append({"type": "image_url"})
    elif fault == "encode":
        stack.encoders[0].engine.refuse = data
    else:
        stack.pds[0].engine.status = status
    response = await stack.http.post(CHAT, json=body)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["message"]


async def _by_url(stack: ServiceStack, data: bytes) -> None:
    assert text_of(await stack.ask("x", data)) == answer_text("x", data)


async def _by_file(stack: ServiceStack, data: bytes) -> None:
    file = {"file": ("a.png", data, "image/png")}
    upload = await stack.http.post("/v1/files", files=file, data={"purpose": "vision"})
    body = stack.body("x")
    part = {"type": "image_file", "image_file": {"file_id": upload.json()["id"]}}
    body["messages"][0]["content"].insert(0, part)
    assert text_of(await stack.http.post(CHAT, json=body)) == answer_text("x", data)


async def _by_job(stack: ServiceStack, data: bytes, part: dict[str, Any], *items: Item) -> None:
    inbox = await Inbox().listen(stack.bus)
    body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "x"}]}]}
    job = direct_job(stack, inbox, body=json.dumps(body).encode(), items=list(items))
    await publish(stack, "generate", encode(job))
    await eventually(lambda: len(inbox.frames) == 3, "head, data and end")
    answer = json.loads(inbox.frames[1].data)
    assert answer["choices"][0]["message"]["content"] == answer_text("x", data)


async def _by_inline_job(stack: ServiceStack, data: bytes) -> None:
    item = Item(media=Media(inline=data))
    await _by_job(stack, data, {"type": "media_ref", "item": 0}, item)


async def _by_job_with_a_data_uri(stack: ServiceStack, data: bytes) -> None:
    await _by_job(stack, data, image_part(data))


async def _by_response(stack: ServiceStack, data: bytes) -> None:
    parts = [
        {"type": "input_image", "image_url": make_data_uri(data)},
        {"type": "input_text", "text": "x"},
    ]
    body = {"model": stack.model, "input": [{"role": "user", "content": parts}]}
    answer = (await stack.http.post(RESPONSES, json=body)).json()
    assert answer["output"][0]["content"][0]["text"] == answer_text("x", data)


WAYS = (_by_url, _by_file, _by_inline_job, _by_job_with_a_data_uri, _by_response)


@pytest.mark.parametrize("first", WAYS, ids=lambda way: way.__name__)
async def test_fc33_every_way_in_makes_the_same_item(
    stack: ServiceStack, first: Callable[..., Any]
) -> None:
    """Whichever comes first has it encoded, all others share its embedding."""
    data = picture()
    await first(stack, data)
    for way in WAYS:
        await way(stack, data)
    assert stack.encoders[0].engine.encoded == [stack.key(data)]


async def test_fc33_every_route_is_served_by_all_stages_or_by_none(stack: ServiceStack) -> None:
    assert set(GENERATE_ROUTES) == set(ROUTES) == set(PROMPT_FIELDS)
    unserved = "/v1/embeddings"  # and so nobody may half serve it
    refused = await stack.http.post(unserved, json={"model": stack.model, "input": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_route")


def test_fc07_encoders_get_many_times_what_an_encode_takes() -> None:
    """Before anybody gives one up for slow, and before a request ends for want of it."""
    fields = PdSettings.model_fields
    patience_s, item_s = fields["encode_patience_s"].default, fields["encode_deadline_s"].default
    full_hd = [2691] * 8  # rows of a batch of 1080p pictures
    slowest_s = max(
        p.encode_s([min(rows, p.max_rows) for rows in full_hd]) for p in PROFILES.values()
    )
    assert patience_s > 4 * slowest_s
    assert patience_s < item_s < fields["deadline_s"].default


async def test_fc19_two_pictures_that_come_to_no_answer_end_with_an_error(
    stack: ServiceStack,
) -> None:
    pd = stack.pds[0].engine
    pd.gate.clear()
    pictures = picture(), picture()
    body, headers = stack.body("never", *pictures), {"x-epd-deadline-s": "0.7"}
    response = await stack.http.post(CHAT, json=body, headers=headers)
    assert response.status_code == 504
    assert response.json()["error"]["stage"] == "generate"
    await eventually(lambda: not pd.running, "the engine has let it go")
    assert len(pd.begun) == 1  # and it was not begun again and again
    pd.gate.set()
    assert text_of(await stack.ask("next", *pictures)) == answer_text("next", *pictures)


async def test_fc39_no_client_waits_longer_than_the_operator_allows(bare: ServiceStack) -> None:
    encoder = await bare.add_encoder()
    await bare.add_pd()
    await bare.add_gateway(deadline_s=0.5)
    await bare.ready()
    encoder.engine.gate.clear()
    body, headers = bare.body("x", picture()), {"x-epd-deadline-s": "100000"}
    assert (await bare.http.post(CHAT, json=body, headers=headers)).status_code == 504
    encoder.engine.gate.set()


# -- work and who does it ------------------------------------------------------------------------------


async def test_fc04_who_is_busy_gets_nothing(bare: ServiceStack) -> None:
    """Six requests, one after the other, go to the encoder that has a free slot."""
    encoders = [await bare.add_encoder(encoder_slots=1) for _ in range(2)]
    await bare.add_pd()
    await started(bare)
    for encoder in encoders:
        encoder.engine.gate.clear()
    slow = picture()
    first = asyncio.create_task(bare.ask("slow", slow))
    await eventually(lambda: any(e.engine.encoded for e in encoders), "one has it")
    busy, free = sorted(encoders, key=lambda e: not e.engine.encoded)
    free.engine.gate.set()
    pictures = [picture() for _ in range(6)]
    for data in pictures:
        assert text_of(await bare.ask("x", data)) == answer_text("x", data)
    assert busy.engine.encoded == [bare.key(slow)]
    assert free.engine.encoded == [bare.key(data) for data in pictures]
    busy.engine.gate.set()
    assert text_of(await first) == answer_text("slow", slow)


async def test_fc25_pictures_of_different_requests_are_with_the_engine_at_once(
    stack: ServiceStack,
) -> None:
    """It can batch only what it has."""
    encoder = stack.encoders[0].engine
    encoder.gate.clear()
    pictures = [picture() for _ in range(8)]
    asking = [asyncio.create_task(stack.ask("x", data)) for data in pictures]
    await eventually(lambda: len(encoder.encoded) == 8, "all are begun, none is done")
    encoder.gate.set()
    for data, task in zip(pictures, asking, strict=True):
        assert text_of(await task) == answer_text("x", data)


async def test_fc32_an_event_names_who_really_encoded(bare: ServiceStack) -> None:
    """Not who had the job first: it died; nor, at last, an encoder at all."""
    first = await bare.add_encoder()
    pd = await bare.add_pd(local_encode="always")
    await started(bare)
    seen = await ready_events(bare)

    async def encoded_by(data: bytes) -> tuple[str, int]:
        (event,) = (e for e in seen if e.key == bare.key(data) and e.state == "ready")
        (claim,) = await KeyStates(bare.redis, lease_s=60, ready_ttl_s=60).claim([event.key])
        assert claim.event == event  # what is remembered names the same
        return event.encoder, event.attempt

    first.engine.gate.clear()
    data = picture()
    asking = asyncio.create_task(bare.ask("x", data))
    await eventually(lambda: bool(first.engine.encoded), "the first one has it")
    second = await bare.add_encoder()
    await bare.ready()
    first.engine.die()
    assert text_of(await asking) == answer_text("x", data)
    assert await encoded_by(data) == (second.id, 2)
    await asyncio.wait((first.process.task,))
    assert first.process.task.exception() is not None
    second.engine.failures = 100
    data = picture()
    assert text_of(await bare.ask("x", data)) == answer_text("x", data)
    assert (await encoded_by(data))[0] == pd.id


# -- traffic and load -----------------------------------------------------------------------------------


def noise(size: int) -> bytes:
    """A PNG of so many bytes or more, which does not compress."""
    side = int((size / 3) ** 0.5) + 8
    buffer = io.BytesIO()
    Image.frombytes("RGB", (side, side), random.Random(size).randbytes(3 * side**2)).save(
        buffer, "PNG"
    )
    return buffer.getvalue()


async def test_fc18_a_large_picture_makes_no_larger_messages(stack: ServiceStack) -> None:
    async def on_the_bus(data: bytes) -> int:
        sizes: list[int] = []

        async def note(message: Msg) -> None:
            sizes.append(len(message.data))

        async with Bus(stack._brokers["nats_url"], name="sniffer") as bus:
            await bus.subscribe("epd.v1.>", note)
            await bus.subscribe("_INBOX_gateway.>", note)
            await bus.flush()
            assert text_of(await stack.ask("x", data)) == answer_text("x", data)
            await bus.flush()
        return sum(sizes)

    small, large = await on_the_bus(picture()), await on_the_bus(noise(600_000))
    # An event more or less is no matter; the picture alone has 600,000.
    assert small > 500 and large > 500 and max(small, large) < 20_000


async def test_fc17_a_pd_worker_reads_no_pictures(
    stack: ServiceStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is given metadata, and the bytes of a picture are read once, to encode it."""
    reads: list[str] = []
    given: list[Any] = []
    get, answer = MediaStore.get, FakePdEngine.answer

    async def noted(store: MediaStore, ref: str) -> bytes | None:
        reads.append(ref)
        return await get(store, ref)

    def seen(engine: FakePdEngine, *args: Any, **named: Any) -> Any:
        given.append(args)
        return answer(engine, *args, **named)

    monkeypatch.setattr(MediaStore, "get", noted)
    monkeypatch.setattr(FakePdEngine, "answer", seen)
    one, two = picture(), picture()
    for _ in range(2):
        assert text_of(await stack.ask("x", one, two)) == answer_text("x", one, two)
    assert sorted(reads) == sorted([digest(one), digest(two)])
    for _, _, body, placeholders, *_ in given:
        assert [item.metadata for item in placeholders] == [{"image_grid_thw": [1, 4, 4]}] * 2
        assert [item.media for item in placeholders] == [None, None]
        sent = json.dumps(body)
        assert base64.b64encode(one).decode()[:40] not in sent and "base64" not in sent


async def test_fc10_more_tokens_make_no_more_lookups(
    stack: ServiceStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked of Valkey depends on a request's items, not on how long its answer is."""
    commands: list[Any] = []
    execute = SharingRedis.execute_command

    async def noted(client: Any, *args: Any, **options: Any) -> Any:
        commands.append(args[0])
        return await execute(client, *args, **options)

    monkeypatch.setattr(SharingRedis, "execute_command", noted)
    data = picture()
    await stack.ask("warm", data)
    asked: list[list[Any]] = []
    for words in (1, 300):
        commands.clear()
        body = stack.body("x", data, stream=True)
        body["messages"][0]["content"] += [{"type": "text", "text": "y"}] * words
        response = await stack.http.post(CHAT, json=body)
        assert response.text.count("data: ") > words
        asked.append(sorted(commands))
    # What goes on beside the request may ask for something, too.
    assert len(asked[0]) > 1 and len(asked[1]) <= len(asked[0]) + 3, asked


@pytest.mark.slow
async def test_fc20_of_200_requests_at_once_none_vanishes(bare: ServiceStack) -> None:
    """And control messages do not queue behind their encodes."""
    encoder = await bare.add_encoder(encoder_slots=4)
    pd = await bare.add_pd(pd_slots=200)
    await started(bare)
    before = await metrics(bare)
    encoder.engine.gate.clear()
    pictures = [picture() for _ in range(50)]

    async def ask(n: int) -> httpx.Response:
        return await bare.http.post(CHAT, json=bare.body(f"{n}", pictures[n % 50]), timeout=60)

    limits = httpx.Limits(max_connections=250)
    async with httpx.AsyncClient(base_url=bare.http.base_url, limits=limits) as bare.http:
        asking = [asyncio.create_task(ask(n)) for n in range(200)]

        async def all_wait() -> bool:
            return await bare.busy(pd) == 200

        await eventually(all_wait, "all wait", within_s=60)
        asking[0].cancel()

        async def cancelled() -> bool:
            return (await bare.counters(pd)).get("cancelled", 0) == 1

        await eventually(cancelled, "a cancel does not wait for encodes")
        assert (await ask_health(bare.bus, encoder.id))["ok"]
        assert len(encoder.engine.encoded) == 4
        encoder.engine.gate.set()
        answers = await asyncio.gather(*asking[1:])
        assert [text_of(answer) for answer in answers] == [
            answer_text(f"{n}", pictures[n % 50]) for n in range(1, 200)
        ]
        after = await metrics(bare)

    def ended(status: int) -> float:
        counted = ("epd_gateway_requests_total", f"{CHAT},{status}")
        return after[counted] - before.get(counted, 0)

    assert (ended(200), ended(499)) == (199, 1)
    assert after["epd_gateway_open_requests", ""] == 0
    assert (await bare.counters(pd))["answered"] == 199
    assert len(encoder.engine.encoded) == 50


@pytest.mark.slow
async def test_fc27_hits_under_load(bare: ServiceStack) -> None:
    """Warm pictures for many at once, while they are evicted: every request is answered, and rightly."""
    await bare.add_encoder()
    pd = await bare.add_pd(pd_slots=64)
    await started(bare)
    pictures = [picture() for _ in range(4)]
    await bare.ask("warm", *pictures)

    async def ask(n: int) -> None:
        used = [pictures[(n + k) % 4] for k in range(1 + n % 2)]
        response = await bare.http.post(CHAT, json=bare.body(f"{n}", *used), timeout=60)
        assert text_of(response) == answer_text(f"{n}", *used)

    async with asyncio.TaskGroup() as group:
        for n in range(128):
            group.create_task(ask(n))
            if n % 32 == 31:
                await bare.forget(pictures[n // 32])
    assert (await bare.counters(pd))["answered"] == 129
    await eventually(lambda: pd.pinned == [], "nothing is pinned")


# -- what operators see ---------------------------------------------------------------------------------


async def test_fc09_what_an_arena_holds_is_a_metric(bare: ServiceStack) -> None:
    node = f"node-{secrets.token_hex(4)}"
    encoder = await bare.add_encoder(node=node, arena_bytes=1 << 24)
    await bare.add_pd(node=node, arena_bytes=1 << 24)
    await started(bare)
    await bare.ask("x", picture(), picture())
    used = sum(path.stat().st_size for path in (encoder.arena / "data").iterdir())
    assert used > 0

    async def told() -> bool:
        return (await metrics(bare))["epd_store_arena_used_bytes", node] == used

    await eventually(told, "the arena's bytes are told")
    assert (await metrics(bare))["epd_store_arena_quota_bytes", node] == 1 << 24


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[ServiceStack]:
    """On brokers of its own, where no other test has left a job."""
    async with (
        embedded_brokers(tmp_path / "brokers") as own,
        bare_stack(own.nats_url, own.redis_url, tmp_path) as stack,
    ):
        yield stack


async def test_fc31_queues_are_metrics_of_each_stage(alone: ServiceStack) -> None:
    encoder = await alone.add_encoder(encoder_slots=1)
    await alone.add_pd(pd_slots=2)
    await started(alone)
    encoder.engine.gate.clear()
    asking = [asyncio.create_task(alone.ask("x", picture())) for _ in range(3)]
    began = time.monotonic()
    want = {
        ("epd_gateway_queue_jobs", f"{alone.model},encode"): 3.0,
        ("epd_gateway_queue_jobs", f"{alone.model},generate"): 3.0,
        ("epd_gateway_worker_slots", f"{alone.model},encoder"): 1.0,
        ("epd_gateway_worker_slots", f"{alone.model},pd"): 2.0,
        ("epd_gateway_worker_busy_slots", f"{alone.model},encoder"): 1.0,
        ("epd_gateway_worker_busy_slots", f"{alone.model},pd"): 2.0,
    }

    async def told() -> bool:
        return want.items() <= (await metrics(alone)).items()

    await eventually(told, f"they are told: {want}")
    found = await metrics(alone)
    for stage in ("encode", "generate"):
        assert 0 < found["epd_gateway_queue_oldest_seconds", stage] <= time.monotonic() - began + 1
    encoder.engine.gate.set()
    await asyncio.gather(*asking)

    async def empty() -> bool:
        found = await metrics(alone)
        return not any(
            found["epd_gateway_queue_jobs", f"{alone.model},{stage}"]
            for stage in ("encode", "generate")
        )

    await eventually(empty, "the queues are empty")


async def test_fc26_busy_is_healthy_and_dead_is_not(bare: ServiceStack) -> None:
    encoder, pd = await bare.add_encoder(encoder_slots=1), await bare.add_pd(pd_slots=1)
    await started(bare)
    encoder.engine.gate.clear()
    asking = asyncio.create_task(bare.ask("x", picture()))

    async def busy() -> bool:
        return await bare.busy(encoder) == await bare.busy(pd) == 1

    await eventually(busy, "no slot is free")
    assert await _well(bare, encoder) and await _well(bare, pd)
    assert (await bare.http.get("/ready")).status_code == 200
    encoder.engine.gate.set()
    await asking
    encoder.engine.die()

    async def noticed() -> bool:
        return (await bare.http.get("/ready")).status_code == 503

    await eventually(noticed, "nobody encodes any more")
    await asyncio.wait((encoder.process.task,))
    assert encoder.process.task.exception() is not None
    assert not await _well(bare, encoder)
    assert await _well(bare, pd)


async def _well(stack: ServiceStack, worker: Worker) -> bool:
    try:
        return bool((await ask_health(stack.bus, worker.id))["ok"])
    except TimeoutError:
        return False


# -- inside vLLM's processes, without vLLM ------------------------------------------------------------------

LOOKS = """
import pathlib, sys
from types import SimpleNamespace as N
from epd_common.store.embedding import EmbeddingHeader, pack_header
from epd_vllm.gate import Gate, managed_params

pins, key, absent = pathlib.Path(sys.argv[1]), "a" * 64, "b" * 64
head = EmbeddingHeader(key=key, rows=4, width=8, dtype="float16", fingerprint="f")
(pins / key).write_bytes(pack_header(head) + bytes(64))
looks, touched, exists = [], [], pathlib.Path.exists

def counted(path, **options):
    looks.append(path.name)
    return exists(path, **options)

pathlib.Path.exists = counted
sys.addaudithook(lambda name, args: touched.append(name) if name.partition(".")[0] in
                 ("socket", "open", "os", "subprocess") else None)
gate = Gate(pins, width=8, dtype="float16")

def request(name, key, computed):
    position = N(offset=2, length=4, get_num_embeds=lambda: 4)
    return N(request_id=name, ec_transfer_params=managed_params([key], "f"),
             mm_features=[N(identifier=key, mm_position=position)], num_computed_tokens=computed)

def passes(requests, count):
    looks.clear(), touched.clear()
    for _ in range(count):
        gate.new_pass()
        for each in requests:
            gate.admits(each, each.num_computed_tokens)
            gate.waits(each)
            if each.num_computed_tokens >= 6:
                each.num_computed_tokens += 1
            else:
                gate.holds_back(each, 0)
    return len(looks), len(touched)

assert gate.admits(request("first", key, 0), 0) and touched == ["open"]
print(passes([request(f"decodes {n}", key, 6) for n in range(50)], 100))
print(passes([request(f"waits {n}", absent, 0) for n in range(50)], 100))
"""

DEVICES = """
import sys
from types import ModuleType, SimpleNamespace as N
import torch

platforms = ModuleType("vllm.platforms")
sys.modules["vllm"], sys.modules["vllm.platforms"] = ModuleType("vllm"), platforms
from epd_vllm.embedding_io import device

for rank in (0, 3):
    platforms.current_platform = N(
        is_cuda_alike=lambda: True, device_type="cuda", current_device=lambda: rank)
    assert device() == torch.device("cuda", rank), device()
platforms.current_platform = N(is_cuda_alike=lambda: False, device_type="cpu")
assert device() == torch.device("cpu")
"""


def run(program: str, *arguments: str) -> str:
    """What a Python program of its own prints: torch is not for this process."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_fc10_a_step_that_decodes_looks_at_no_file(tmp_path: Path) -> None:
    """And one that waits looks once a key and pass, however many wait; nothing else leaves the process."""
    assert run(LOOKS, str(tmp_path)).splitlines() == ["(0, 0)", "(100, 0)"]


@pytest.mark.slow
def test_fc12_an_embedding_goes_to_the_device_of_its_rank() -> None:
    run(DEVICES)
