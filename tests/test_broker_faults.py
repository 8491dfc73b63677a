"""Faults of Valkey, of NATS and of readers, on real brokers: requests end in an answer or a clear error, and
what comes after works without a hand."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from direct import direct_job, publish
from epd_cli.brokers import Brokers, embedded_brokers
from epd_common.protocol import encode
from epd_sim.answers import expected_answer
from fake_engine import answer_text
from forwarder import Forwarder
from load import Balancer
from service_stack import (
    BOUND_S,
    CHAT,
    ServiceStack,
    eventually,
    picture,
    service_stack,
    stream_text,
    text_of,
)
from sim_stack import SimStack, sim_stack

pytestmark = pytest.mark.slow  # brokers that are stopped

STEP_S = 0.004
SOCKET_TIMEOUT_S = 0.5
CLEAR = {"redis_unavailable", "media_gone", "unavailable"}


@pytest.fixture(scope="module")
async def own(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Brokers]:
    """Brokers that may be stopped; Valkey on TCP as well."""
    async with embedded_brokers(tmp_path_factory.mktemp("faults"), redis_tcp=True) as running:
        yield running


@pytest.fixture
async def stack(
    own: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SimStack]:
    monkeypatch.setattr("epd_common.store.redis_client.SOCKET_TIMEOUT_S", SOCKET_TIMEOUT_S)
    async with sim_stack(own.nats_url, own.redis_url, tmp_path) as made:
        yield made


async def ask_rightly(stack: SimStack, text: str, *pictures: bytes) -> httpx.Response:
    response = await stack.ask(text, *pictures)
    assert text_of(response) == expected_answer(stack.body(text, *pictures), pictures)
    return response


def error_of(response: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["error"]
    return found


# -- Valkey restarts, and has lost everything --------------------------------------------------------


async def test_valkey_restarts_under_load(own: Brokers, stack: SimStack) -> None:
    stack.pd_time.real_s = stack.encoder_time.real_s = STEP_S
    await stack.start(encoders=2, pds=2)
    balancer = Balancer(stack.model)
    balancer.add(stack.gateway_url)
    async with balancer.load():
        for _ in range(3):
            await balancer.more(20)
            await own.redis.restart()
        await balancer.more(20)
    assert balancer.wrong == []
    assert set(balancer.retried) <= CLEAR
    for worker in (*stack.encoders, *stack.pds):
        assert not worker.process.task.done()


async def test_what_valkey_lost_is_a_clear_503_and_the_arena_goes_on(
    own: Brokers, stack: SimStack
) -> None:
    stack.settings["encoder_slots"] = 1
    await stack.start()
    known, begun, queued = picture(), picture(), picture()
    await ask_rightly(stack, "known", known)
    encoder = stack.encoders[0]
    stack.encoder_time.passing.clear()
    first = asyncio.create_task(ask_rightly(stack, "its media were read", begun))
    await eventually(lambda: encoder.engine.owes, "the first is being encoded")
    second = asyncio.create_task(stack.ask("its media wait in Valkey", queued))

    async def both_wait() -> bool:
        return await stack.busy(stack.pds[0]) == 2

    await eventually(both_wait, "both are under way")
    await own.redis.restart()
    stack.encoder_time.passing.set()
    await first
    lost = await second
    assert (lost.status_code, lost.headers["retry-after"]) == (503, "1")
    assert (error_of(lost)["code"], error_of(lost)["stage"]) == ("media_gone", "encode")
    assert error_of(lost)["key"] == stack.key(queued)
    await ask_rightly(stack, "sent again", queued)
    hits = (await stack.counters(encoder)).get("hits", 0)
    await ask_rightly(stack, "known", known)
    assert (await stack.counters(encoder))["hits"] == hits + 1  # from the arena, not encoded anew


# -- Valkey is full ----------------------------------------------------------------------------------


async def test_a_full_valkey_is_a_clear_503(own: Brokers, stack: SimStack) -> None:
    await stack.start()
    known = picture()
    await ask_rightly(stack, "known", known)
    stack.encoder_time.passing.clear()
    under_way = asyncio.create_task(ask_rightly(stack, "under way", picture()))
    await eventually(lambda: stack.encoders[0].engine.owes, "one is being encoded")
    before = (await stack.redis.config_get("maxmemory"))["maxmemory"]
    await stack.redis.config_set("maxmemory", 1)
    try:
        for _ in range(3):
            full = await stack.ask("new", picture())
            assert (full.status_code, full.headers["retry-after"]) == (503, "1")
            assert error_of(full)["code"] == "store_full"
            assert "try again" in error_of(full)["message"]
        await ask_rightly(stack, "text needs no room")
    finally:
        await stack.redis.config_set("maxmemory", before)
    stack.encoder_time.passing.set()
    await under_way
    await ask_rightly(stack, "room again", picture(), known)
    for worker in (*stack.encoders, *stack.pds):
        assert not worker.process.task.done()


async def test_what_finds_valkey_full_on_its_way_ends_in_time(
    own: Brokers, stack: SimStack
) -> None:
    """It stays full: the encoder can announce nothing, and nobody waits for ever."""
    await stack.start()
    stack.encoder_time.passing.clear()
    asking = asyncio.create_task(
        stack.http.post(
            CHAT, json=stack.body("under way", picture()), headers={"x-epd-deadline-s": "5"}
        )
    )
    await eventually(lambda: stack.encoders[0].engine.owes, "it is being encoded")
    before = (await stack.redis.config_get("maxmemory"))["maxmemory"]
    await stack.redis.config_set("maxmemory", 1)
    try:
        stack.encoder_time.passing.set()
        ended = await asking
        assert ended.status_code in (503, 504), ended.text
        assert error_of(ended)["stage"] == "encode"
    finally:
        await stack.redis.config_set("maxmemory", before)
    await ask_rightly(stack, "room again", picture())


# -- one PD worker does not reach Valkey --------------------------------------------------------------


@pytest.fixture
async def way(own: Brokers) -> AsyncIterator[Forwarder]:
    """To Valkey, for those that take :func:`by`."""
    port = urlsplit(own.redis.tcp_url).port
    assert port is not None
    async with Forwarder(port) as forwarder:
        yield forwarder


def by(way: Forwarder, own: Brokers) -> str:
    return own.redis.tcp_url.rpartition(":")[0] + f":{way.port}"


@pytest.mark.parametrize("how", ["cut", "hang"])
async def test_a_pd_worker_without_valkey_answers_from_its_arena(
    own: Brokers, stack: SimStack, way: Forwarder, how: str
) -> None:
    await stack.add_encoder()
    await stack.add_pd(redis_url=by(way, own))
    await stack.start(encoders=0, pds=0)
    await ask_rightly(stack, "before", one := picture())
    getattr(way, how)()
    await ask_rightly(stack, "text")
    unseen_size = picture((40, 60))
    await ask_rightly(stack, "new and known", picture(), unseen_size, one)
    way.restore()
    await ask_rightly(stack, "after", picture(), one)
    assert "given_back" not in await stack.counters(stack.pds[0])


@pytest.mark.parametrize("how", ["cut", "hang"])
async def test_what_it_cannot_answer_goes_to_another(
    own: Brokers, stack: SimStack, way: Forwarder, how: str
) -> None:
    """It is on another node than the encoder, so the embedding would come through Valkey."""
    await stack.add_encoder()
    weak = await stack.add_pd(arena="far", redis_url=by(way, own), store_patience_s=0.5)
    await stack.start(encoders=0, pds=0)
    await ask_rightly(stack, "before", picture())
    getattr(way, how)()
    asking = asyncio.create_task(ask_rightly(stack, "moves", picture()))

    async def gave_back() -> bool:
        return bool((await stack.counters(weak)).get("given_back"))

    await eventually(gave_back, "it gives the request back")
    other = await stack.add_pd()
    assert (await asking).headers["x-epd-worker"] == other.id
    await stack.ready()
    balancer = Balancer(stack.model)
    balancer.add(stack.gateway_url)
    async with balancer.load():
        await balancer.more(20)
        way.restore()
        answered = (await stack.counters(weak)).get("answered", 0)

        async def again() -> bool:
            return (await stack.counters(weak))["answered"] > answered

        await eventually(again, "it answers again", 3 * BOUND_S)
    assert balancer.wrong == []


async def test_alone_it_rests_between_its_attempts_and_ends_with_a_clear_503(
    own: Brokers, stack: SimStack, way: Forwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given back would be taken at once again, five times, before any other could have it."""
    monkeypatch.setattr("epd_common.worker.STEP_BACK_S", 0.25)
    await stack.add_encoder()
    await stack.add_pd(arena="far", redis_url=by(way, own), store_patience_s=0)
    await stack.start(encoders=0, pds=0)
    way.cut()
    began = time.monotonic()
    ended = await stack.ask("x", picture())
    rests_s = (0.25 + 0.5 + 1 + 2) * 0.9
    assert time.monotonic() - began > rests_s
    assert (ended.status_code, ended.headers["retry-after"]) == (503, "1"), ended.text
    assert error_of(ended)["code"] == "redis_unavailable"
    way.restore()
    await ask_rightly(stack, "after", picture())


async def test_an_encoder_without_valkey_leaves_its_jobs_to_another(
    own: Brokers, stack: SimStack, way: Forwarder
) -> None:
    """Nobody notices, though it asks for jobs as well as the other one does."""
    stack.pd_time.real_s = stack.encoder_time.real_s = STEP_S
    weak = await stack.add_encoder(redis_url=by(way, own))
    await stack.start(encoders=1)
    balancer = Balancer(stack.model)
    balancer.add(stack.gateway_url)
    async with balancer.load():
        await balancer.more(10)
        way.cut()
        await balancer.more(40)
        assert (await stack.counters(weak))["given_back"] > 0
        way.restore()
        encoded = (await stack.counters(weak)).get("encoded", 0)

        async def again() -> bool:
            return (await stack.counters(weak)).get("encoded", 0) > encoded

        await eventually(again, "it encodes again", 3 * BOUND_S)
    assert (balancer.wrong, balancer.retried) == ([], {})


async def test_text_needs_no_valkey(own: Brokers, stack: SimStack) -> None:
    await stack.start()
    await own.redis.stop()
    try:
        await ask_rightly(stack, "text")
        away = await stack.ask("picture", picture())
        assert (away.status_code, away.headers["retry-after"]) == (503, "1")
        assert error_of(away)["code"] == "redis_unavailable"
    finally:
        await own.redis.start()
    await ask_rightly(stack, "picture", picture())


async def test_ready_says_so_in_time_when_valkey_hangs(
    own: Brokers, stack: SimStack, way: Forwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_common.store.redis_client.SOCKET_TIMEOUT_S", 300.0)
    await stack.add_encoder()
    await stack.add_pd()
    await stack.add_gateway(redis_url=by(way, own))
    await stack.ready()
    way.hang()
    ready = await stack.http.get("/ready", timeout=BOUND_S)
    assert ready.status_code == 503
    assert "Redis does not answer" in error_of(ready)["message"]
    assert (await stack.http.get("/health")).status_code == 200
    way.restore()

    async def again() -> bool:
        return (await stack.http.get("/ready")).status_code == 200

    await eventually(again, "it is ready again")


# -- readers that do not read -------------------------------------------------------------------------


@pytest.fixture
async def fakes(own: Brokers, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    async with service_stack(own.nats_url, own.redis_url, tmp_path) as made:
        yield made


async def test_a_slow_http_client_ends_alone(
    fakes: ServiceStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_common.replies.reply.BUFFER_BYTES", 1 << 20)
    engine = fakes.pds[0].engine
    engine.padding = "x" * 12_000_000  # more than sockets hold
    url = fakes.http.base_url
    body = json.dumps(fakes.body("big", stream=True)).encode()
    reader, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    assert b"200" in await reader.readline()
    engine.padding = ""
    for number in range(10):
        data = picture()
        answer = await fakes.ask(f"small {number}", data)
        assert text_of(answer) == answer_text(f"small {number}", data)
    rest = await asyncio.wait_for(_read(reader), BOUND_S)
    assert b"reader_too_slow" in rest
    writer.close()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """The last of what comes, until nothing does."""
    last = b""
    while b"[DONE]" not in last:
        piece = await reader.read(1 << 16)
        if not piece:
            break
        last = last[-4096:] + piece
    return last


async def test_a_requester_on_nats_that_does_not_read_ends_alone(
    own: Brokers, fakes: ServiceStack
) -> None:
    """The server holds its frames, or cuts it off; the PD worker and all others go on."""
    engine = fakes.pds[0].engine
    engine.padding = "x" * 12_000_000
    parts = urlsplit(own.nats_url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1024)
    inbox = f"_INBOX.test.{secrets.token_hex(8)}"
    login = {"user": parts.username, "pass": parts.password, "verbose": False}
    writer.write(f"CONNECT {json.dumps(login)}\r\nSUB {inbox} 1\r\nPING\r\n".encode())
    async with asyncio.timeout(BOUND_S):
        while await reader.readline() != b"PONG\r\n":
            pass
    await publish(fakes, "generate", encode(direct_job(fakes, inbox)))
    await eventually(lambda: len(engine.begun) == 1, "it is being answered")
    engine.padding = ""
    for number in range(10):
        data = picture()
        answer = await fakes.ask(f"small {number}", data)
        assert text_of(answer) == answer_text(f"small {number}", data)

    async def done() -> bool:
        return await fakes.busy(fakes.pds[0]) == 0

    await eventually(done, "the worker has done it")
    writer.close()


# -- NATS restarts ------------------------------------------------------------------------------------


async def test_nats_restarts_while_answers_stream_and_jobs_wait(
    own: Brokers, stack: SimStack
) -> None:
    await stack.add_encoder()
    await stack.add_pd(pd_slots=2)
    await stack.start(encoders=0, pds=0)
    begun = asyncio.Event()
    stack.pd_time.hold_after = 4

    async def stream(text: str, one: bytes) -> str:
        raw = ""
        async with stack.streaming(text, one, max_tokens=30) as response:
            assert response.status_code == 200
            async for piece in response.aiter_text():
                begun.set()
                raw += piece
        return raw

    pictures = [picture() for _ in range(6)]
    streaming = asyncio.create_task(stream("long", pictures[0]))
    async with asyncio.timeout(BOUND_S):
        await begun.wait()
    whole = [asyncio.create_task(stack.ask("waits", data)) for data in pictures[1:]]

    async def queued() -> bool:
        info = await stack.bus.js.stream_info("EPD_GENERATE")
        return int(info.state.messages) >= 6

    await eventually(queued, "the others wait")
    computed = len(stack.pd_time.slept)
    await own.nats.kill()
    stack.pd_time.passing.set()  # pieces of the answer find nobody to take them
    await eventually(lambda: len(stack.pd_time.slept) > computed + 5, "the answer goes on")
    await own.nats.start()
    raw = await streaming
    body = stack.body("long", pictures[0], max_tokens=30)
    assert stream_text(raw) == expected_answer(body, pictures[:1])
    for data, answer in zip(pictures[1:], await asyncio.gather(*whole), strict=True):
        assert text_of(answer) == expected_answer(stack.body("waits", data), [data])

    async def serves() -> bool:
        return (await stack.ask("new", picture())).status_code == 200

    await eventually(serves, "new requests are answered")
