"""Who is let in by a gateway, and when its requests end: shares, priorities, deadlines, what cannot fit."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from direct import Inbox, direct_job, publish
from epd_common.api_keys import ApiKey, hash_key
from epd_common.protocol import EncodeJob, Media, encode, subjects
from epd_common.protocol.keys import digest
from epd_common.store import KeyStates
from fake_engine import answer_text
from leftovers import queued
from service_stack import (
    CHAT,
    ServiceStack,
    bare_stack,
    eventually,
    image_part,
    picture,
    service_stack,
    text_of,
)
from sim_stack import SimStack, sim_stack

pytestmark = pytest.mark.slow  # services of their own


def key_of(tenant: str, **fields: Any) -> ApiKey:
    return ApiKey(hash=hash_key(tenant.encode()), tenant=tenant, **fields)


KEYS = (
    key_of("a"),
    key_of("b"),
    key_of("c"),
    key_of("vip", priority=-5),
    key_of("heavy", weight=3),
)
SMALL: dict[str, Any] = {"admission_capacity": 1000, "admission_least": 0}
"""Room for two requests of 400, and a line at 750."""


@contextlib.asynccontextmanager
async def keyed(
    nats_url: str, redis_url: str, folder: Path, **settings: Any
) -> AsyncIterator[ServiceStack]:
    async with bare_stack(nats_url, redis_url, folder) as stack:
        await stack.add_encoder()
        await stack.add_pd()
        await stack.add_gateway(api_keys=KEYS, **settings)
        stack.http.headers["authorization"] = "Bearer a"
        await stack.ready()
        yield stack


async def ask_as(
    stack: ServiceStack, tenant: str, *pictures: bytes, **fields: Any
) -> httpx.Response:
    body = stack.body("x", *pictures, **fields)
    return await stack.http.post(CHAT, json=body, headers={"authorization": f"Bearer {tenant}"})


async def samples(stack: ServiceStack, name: str) -> dict[tuple[str, ...], float]:
    """Values of a metric by those of its labels, in the order of their names."""
    text = (await stack.http.get("/metrics")).text
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def check_refused(answer: httpx.Response, code: str) -> None:
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, code), answer.text
    assert 1 <= int(answer.headers["retry-after"]) <= 30


# -- shares -----------------------------------------------------------------------------------------


async def test_a_tenant_over_its_share_and_a_full_system(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with keyed(nats_url, redis_url, tmp_path, **SMALL) as stack:
        engine = stack.pds[0].engine
        engine.gate.clear()

        def begin(tenant: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(ask_as(stack, tenant, max_tokens=400))

        running = [begin("a")]
        await eventually(lambda: len(engine.running) == 1, "the first one runs")
        check_refused(await ask_as(stack, "a", max_tokens=400), "tenant_over_share")
        running.append(begin("b"))
        await eventually(lambda: len(engine.running) == 2, "a newcomer gets in")
        check_refused(await ask_as(stack, "c", max_tokens=400), "system_full")
        assert await samples(stack, "epd_gateway_open_cost_tokens") == {(stack.model,): 800}
        assert await samples(stack, "epd_gateway_admission_capacity_tokens") == {
            (stack.model,): 1000
        }
        engine.gate.set()
        assert [text_of(answer) for answer in await asyncio.gather(*running)] == ["x", "x"]
        assert await samples(stack, "epd_gateway_admissions_total") == {
            ("let_in", "a"): 1,
            ("tenant_over_share", "a"): 1,
            ("let_in", "b"): 1,
            ("system_full", "c"): 1,
        }

        async def let_in() -> bool:
            return (await ask_as(stack, "a", max_tokens=700)).status_code == 200

        await eventually(let_in, "what ended is free again")


async def test_what_is_open_is_not_shown_of_a_model_that_has_gone(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    names = ("epd_gateway_open_cost_tokens", "epd_gateway_admission_capacity_tokens")
    async with keyed(nats_url, redis_url, tmp_path) as stack:
        assert (await ask_as(stack, "a")).status_code == 200
        for name in names:
            assert set(await samples(stack, name)) == {(stack.model,)}
        for worker in (*stack.encoders, *stack.pds):
            await worker.process.stop()

        async def gone() -> bool:
            return not any([await samples(stack, name) for name in names])

        await eventually(gone, "nothing is shown of it")


async def test_one_request_of_whatever_cost_leaves_room_for_another_tenant(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with keyed(nats_url, redis_url, tmp_path, **SMALL) as stack:
        engine = stack.pds[0].engine
        engine.gate.clear()
        running = [asyncio.create_task(ask_as(stack, "a", max_tokens=4000, n=8))]
        await eventually(lambda: len(engine.running) == 1, "it runs")
        assert await samples(stack, "epd_gateway_open_cost_tokens") == {(stack.model,): 750}
        running.append(asyncio.create_task(ask_as(stack, "b", max_tokens=200)))
        await eventually(lambda: len(engine.running) == 2, "and so does another tenant's")
        engine.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]


async def test_whoever_leaves_frees_its_share_at_once(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with keyed(nats_url, redis_url, tmp_path, **SMALL) as stack:
        engine = stack.pds[0].engine
        engine.gate.clear()
        async with stack.streaming("x", max_tokens=700):
            check_refused(await ask_as(stack, "a", max_tokens=700), "tenant_over_share")
        engine.gate.set()

        async def let_in() -> bool:
            return (await ask_as(stack, "a", max_tokens=700)).status_code == 200

        await eventually(let_in, "it is free, before its lease ends", within_s=5.0)


async def test_without_keys_the_whole_is_bounded(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        pd = await stack.add_pd()
        await stack.add_gateway(**SMALL)
        await stack.ready()
        pd.engine.gate.clear()
        running = [asyncio.create_task(stack.ask("x", max_tokens=400)) for _ in range(2)]
        await eventually(lambda: len(pd.engine.running) == 2, "beyond the line")
        check_refused(await stack.ask("x", max_tokens=400), "system_full")
        pd.engine.gate.set()
        assert [text_of(answer) for answer in await asyncio.gather(*running)] == ["x", "x"]
        text_of(await stack.ask("x", max_tokens=4000))  # more than the whole runs alone


async def test_a_flood_is_refused_before_its_pictures_are_loaded(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with keyed(nats_url, redis_url, tmp_path, **SMALL) as stack:
        stack.pds[0].engine.gate.clear()
        running = asyncio.create_task(ask_as(stack, "a", max_tokens=700))
        await eventually(lambda: len(stack.pds[0].engine.running) == 1, "one runs")
        data = picture()
        check_refused(await ask_as(stack, "a", data, max_tokens=700), "tenant_over_share")
        assert not await stack.redis.exists(f"epd:v1:media:{digest(data)}")
        assert not stack.encoders[0].engine.encoded
        stack.pds[0].engine.gate.set()
        await running


# -- fairness on the simulated engine ---------------------------------------------------------------


@contextlib.asynccontextmanager
async def sim_keyed(
    nats_url: str, redis_url: str, folder: Path, **settings: Any
) -> AsyncIterator[SimStack]:
    async with sim_stack(nats_url, redis_url, folder) as stack:
        await stack.add_encoder()
        await stack.add_pd(pd_slots=4, max_num_seqs=4, max_incomplete=2)
        await stack.add_gateway(api_keys=KEYS, **settings)
        stack.http.headers["authorization"] = "Bearer a"
        await stack.ready()
        assert (
            await ask_as(stack, "a", picture())
        ).status_code == 200  # rows of a picture are known
        yield stack


class Crowd:
    """Tenants that ask for a picture each time, and ask again until they are let in."""

    def __init__(self, stack: SimStack) -> None:
        self.stack = stack
        self.answered: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._data = [picture() for _ in range(8)]

    async def once(self, tenant: str, number: int) -> None:
        data = self._data[number % len(self._data)]
        answer = await ask_as(self.stack, tenant, data, max_tokens=100, ignore_eos=True)
        if answer.status_code == 200:
            self.answered[tenant] += 1
            return
        assert answer.status_code == 429, answer.text
        self.refused[tenant] += 1
        await asyncio.sleep(0.1)  # less patient than it is told to be

    async def flood(self, tenant: str, at_once: int) -> None:
        async def ask_for_ever(first: int) -> None:
            number = first
            while True:
                await self.once(tenant, number)
                number += 1

        async with asyncio.TaskGroup() as group:
            for first in range(at_once):
                group.create_task(ask_for_ever(first))

    async def run(self, *floods: Awaitable[None], until: Callable[[], bool]) -> None:
        tasks = [asyncio.ensure_future(flood) for flood in floods]
        try:
            await eventually(until, "enough is answered", within_s=60.0)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


CONTENDED: dict[str, Any] = {"admission_capacity": 1600, "admission_least": 0}
"""A line at 1200: some eleven requests of about 105."""


@pytest.mark.parametrize(("rival", "expected"), [("b", 0.5), ("heavy", 0.25)])
async def test_tenants_that_both_want_more_get_their_shares(
    nats_url: str, redis_url: str, tmp_path: Path, rival: str, expected: float
) -> None:
    async with sim_keyed(nats_url, redis_url, tmp_path, **CONTENDED) as stack:
        crowd = Crowd(stack)

        def warm() -> bool:
            return crowd.answered.total() >= 30

        def enough() -> bool:
            return crowd.answered.total() >= 160

        before: Counter[str] = Counter()

        async def note() -> None:
            await eventually(warm, "warm", within_s=60.0)
            before.update(crowd.answered)

        # The rival has the more hands, as a flood has.
        await crowd.run(crowd.flood(rival, 16), crowd.flood("a", 8), note(), until=enough)
        got = crowd.answered - before
        assert got["a"] / got.total() == pytest.approx(expected, abs=0.15), crowd.answered
        assert crowd.refused[rival] > 0


@pytest.mark.parametrize("rival", ["b", "heavy"])
async def test_who_asks_now_and_then_is_not_starved_by_a_flood(
    nats_url: str, redis_url: str, tmp_path: Path, rival: str
) -> None:
    async with sim_keyed(nats_url, redis_url, tmp_path, **CONTENDED) as stack:
        crowd = Crowd(stack)

        async def now_and_then() -> None:
            await eventually(lambda: crowd.refused[rival] > 0, "the flood is there", within_s=30.0)
            for number in range(12):
                await crowd.once("a", number)

        await crowd.run(
            crowd.flood(rival, 16),
            now_and_then(),
            until=lambda: crowd.answered["a"] + crowd.refused["a"] >= 12,
        )
        assert crowd.refused["a"] == 0, "it holds less than its share"


LONG = 20_000
"""Tokens of an answer that takes longer than any of these tests."""


@contextlib.asynccontextmanager
async def streams(stack: ServiceStack, tenant: str, count: int) -> AsyncIterator[None]:
    """Long answers of a tenant, all open at once; some run, and the others wait."""
    body = stack.body("x", max_tokens=LONG, ignore_eos=True, stream=True)
    headers = {"authorization": f"Bearer {tenant}"}

    async def hold() -> None:
        async with stack.http.stream("POST", CHAT, json=body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for _ in answer.aiter_lines():
                pass

    tasks = [asyncio.create_task(hold()) for _ in range(count)]
    try:
        yield
        failed = [task for task in tasks if task.done() and task.exception()]
        assert not failed, failed[0].exception()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_long_answers_of_one_tenant_leave_slots_to_others(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """By tokens they are below the line, and so many that each slot could have two of them."""
    async with sim_stack(nats_url, redis_url, tmp_path) as stack:
        await stack.add_encoder()
        pd = await stack.add_pd(pd_slots=8, max_num_seqs=8, max_incomplete=2)
        stack.pd_time.real_s = 0.002
        await stack.add_gateway(api_keys=KEYS)
        stack.http.headers["authorization"] = "Bearer a"
        await stack.ready()
        async with streams(
            stack, "a", 6
        ):  # first, so that none of those behind is fetched before them

            async def they_run() -> bool:
                return await stack.busy(pd) == 6

            await eventually(they_run, "they have their share")
            async with streams(stack, "a", 10):
                await _messages(stack, 16)
                for _ in range(3):
                    async with asyncio.timeout(15.0):
                        answer = await ask_as(stack, "b", picture(), max_tokens=8)
                    assert answer.status_code == 200, answer.text
                assert await stack.busy(pd) == 6, "three quarters, and ten wait"


# -- priorities -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, 1.5, "1", 10**9, [1]])
async def test_a_wrong_priority(
    nats_url: str, redis_url: str, tmp_path: Path, value: object
) -> None:
    async with service_stack(nats_url, redis_url, tmp_path, encoders=0) as stack:
        answer = await stack.ask("x", priority=value)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "priority"


async def test_a_key_says_how_urgent_its_requests_may_be(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with keyed(nats_url, redis_url, tmp_path) as stack:
        for tenant, priority, status in (
            ("a", -1, 400),
            ("a", 0, 200),
            ("a", 7, 200),
            ("vip", -5, 200),
            ("vip", -6, 400),
        ):
            answer = await ask_as(stack, tenant, priority=priority)
            assert answer.status_code == status, answer.text
            if status == 400:
                assert answer.json()["error"]["code"] == "priority_not_allowed"


async def test_what_can_wait_waits_in_the_queue(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        pd = await stack.add_pd(pd_slots=1)
        await stack.add_gateway()
        await stack.ready()
        pd.engine.gate.clear()
        asked = []
        for waiting, priority in enumerate((0, 3, 0, -1), 1):
            asked.append(asyncio.create_task(stack.ask("x", priority=priority)))
            await _messages(stack, waiting)
            await eventually(lambda: len(pd.engine.running) == 1, "the one slot is taken")
        pd.engine.gate.set()
        first, late, normal, urgent = [
            answer.headers["x-request-id"] for answer in await asyncio.gather(*asked)
        ]
        assert pd.engine.begun == [first, normal, urgent, late], (
            "urgent and small ones share a lane"
        )


async def _messages(stack: ServiceStack, count: int) -> None:
    """Return when so many generate jobs of the model are queued or in work."""
    consumers = [subjects.generate_consumer(stack.model, lane) for lane in subjects.LANES]

    async def so_many() -> bool:
        found = [
            await stack.bus.js.consumer_info(subjects.GENERATE_STREAM, name) for name in consumers
        ]
        return sum(info.num_pending + info.num_ack_pending for info in found) == count

    await eventually(so_many, f"{count} jobs")


async def test_the_engine_serves_the_urgent_first(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with sim_stack(nats_url, redis_url, tmp_path) as stack:
        pd = await stack.add_pd(max_num_seqs=1, max_incomplete=0)
        await stack.add_gateway()
        await stack.ready()
        stack.pd_time.passing.clear()
        scheduler, begun = pd.engine._scheduler, []
        schedule = scheduler.schedule

        def noted(is_here: Callable[[str], bool]) -> Any:
            step = schedule(is_here)
            begun.extend(round(sequence.priority / 10**12) for sequence, _ in step.prefill)
            return step

        scheduler.schedule = noted
        asked = []
        for inside, priority in enumerate((5, 0, -2, -1), 1):
            asked.append(asyncio.create_task(stack.ask("x", priority=priority)))
            await eventually(lambda n=inside: len(pd.engine._inside) == n, "it is inside")  # type: ignore[misc]
        await eventually(lambda: begun == [5], "the one slot is taken")
        stack.pd_time.passing.set()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 4
        assert begun == [5, -2, -1, 0]


# -- deadlines --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def running(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServiceStack]:
    folder = tmp_path_factory.mktemp("deadlines")
    async with bare_stack(nats_url, redis_url, folder) as stack:
        await stack.add_encoder(encoder_slots=1)
        await stack.add_pd()
        await stack.add_gateway(media_allow_hosts="127.0.0.1")
        await stack.ready()
        yield stack


def check_late(answer: httpx.Response, stage: str) -> None:
    assert answer.status_code == 504, answer.text
    assert answer.json()["error"]["stage"] == stage
    assert answer.json()["error"]["code"] == "deadline_exceeded"


def within(seconds: float) -> dict[str, str]:
    return {"x-epd-deadline-s": str(seconds)}


async def test_a_body_that_does_not_come(running: ServiceStack) -> None:
    url = running.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        "x-epd-deadline-s: 0.3\r\ncontent-length: 100\r\n\r\n{".encode()
    )
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
    assert b" 504 " in answer
    writer.close()


async def test_a_url_that_does_not_answer(running: ServiceStack) -> None:
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # to its end: the gateway hangs up
        gone.set()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        part = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{port}/a.png"}}
        body = {"model": running.model, "messages": [{"role": "user", "content": [part]}]}
        check_late(await running.http.post(CHAT, json=body, headers=within(0.3)), "ingest")
        await asyncio.wait_for(gone.wait(), 10)


async def test_an_encode_is_dropped_in_the_engine_and_in_the_queue(running: ServiceStack) -> None:
    """The one slot holds an encode; another job waits behind it. Both have had their time."""
    (encoder,) = running.encoders

    before = (await running.counters(encoder)).get("dropped", 0)
    encoder.engine.gate.clear()
    first, second = picture(), picture()
    answers = []
    try:
        async with asyncio.TaskGroup() as group:
            for data, seconds in ((first, 1.5), (second, 0.5)):
                body = running.body("x", data)
                asked = running.http.post(CHAT, json=body, headers=within(seconds))
                answers.append(group.create_task(asked))
                await eventually(lambda: running.key(first) in encoder.engine.encoded, "it begins")
        for answer in answers:
            check_late(answer.result(), "encode")

        async def dropped() -> bool:
            counters = await running.counters(encoder)
            return counters.get("dropped", 0) == before + 1 and await queued(running, "encode") == 0

        # While the engine is still held: the one in it is given up, the other one is off the queue.
        await eventually(dropped, "both are dropped")
        assert await running.busy(encoder) == 0
        assert running.key(second) not in encoder.engine.encoded, "it was never begun"
    finally:
        encoder.engine.gate.set()
    assert text_of(await running.ask("again", second)) == answer_text("again", second)


async def test_an_encode_job_that_is_late_is_not_begun(running: ServiceStack) -> None:
    (encoder,) = running.encoders
    data = picture()
    states = KeyStates(running.redis, lease_s=60, ready_ttl_s=60)
    (claim,) = await states.claim([running.key(data)])
    job = EncodeJob(
        key=running.key(data),
        epoch=claim.epoch,
        model=running.model,
        fingerprint=running.fingerprint,
        media=Media(inline=data),
        deadline=time.time() - 1.0,
    )
    before = (await running.counters(encoder)).get("dropped", 0)
    await publish(running, "encode", encode(job))

    async def dropped() -> bool:
        return (await running.counters(encoder)).get("dropped", 0) == before + 1

    await eventually(dropped, "it is dropped")
    assert running.key(data) not in encoder.engine.encoded


async def test_who_shares_an_encode_that_is_dropped_has_it_made_again(
    running: ServiceStack,
) -> None:
    (encoder,) = running.encoders
    encoder.engine.gate.clear()
    data = picture()
    try:
        late = asyncio.create_task(
            running.http.post(CHAT, json=running.body("x", data), headers=within(1.0))
        )
        await eventually(lambda: running.key(data) in encoder.engine.encoded, "it begins")
        patient = asyncio.create_task(running.ask("patient", data))
        assert (await late).status_code == 504
        await eventually(
            lambda: encoder.engine.encoded.count(running.key(data)) == 2, "it is ordered again"
        )
    finally:
        encoder.engine.gate.set()
    answer = await patient
    assert text_of(answer) == answer_text("patient", data)
    assert answer.headers["x-epd-items"] == "shared"


async def test_a_job_with_a_deadline_far_off_has_the_workers_bound(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        pd = await stack.add_pd(deadline_s=0.5)
        await stack.add_gateway()
        await stack.ready()
        pd.engine.gate.clear()
        inbox = await Inbox().listen(stack.bus)
        job = direct_job(stack, inbox, deadline=time.time() + 1e6)
        await publish(stack, "generate", encode(job))
        error = await inbox.error()
        assert (error.status, error.stage) == (504, "generate")


# -- what cannot fit --------------------------------------------------------------------------------


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    shade = picture()[-20]
    Image.new("RGB", (width, height), (shade, len(picture()), time.time_ns() & 255)).save(
        buffer, "PNG"
    )
    return buffer.getvalue()


async def test_what_is_too_long_for_the_model_is_refused_before_any_encode(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with sim_stack(nats_url, redis_url, tmp_path) as stack:
        stack.settings["max_items"] = 100
        await stack.start()
        (encoder,) = stack.encoders
        assert (await stack.ask("learn the size", png(1000, 1000))).status_code == 200
        encoded = (await stack.counters(encoder))["encoded"]
        # 1,024 rows each, of 32,768 tokens.
        body = stack.body("too long")
        body["messages"][0]["content"] = [image_part(png(1000, 1000))] * 32
        answer = await stack.http.post(CHAT, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "prompt_too_long")
        body["messages"][0]["content"].pop()
        assert (await stack.http.post(CHAT, json=body)).status_code == 200

        # An encoder cache of 2,048 rows; these have 5,102. The first is refused once its size is known.
        wide = {"mm_processor_kwargs": {"max_pixels": 2**24}}
        for expected in (2, 2):
            answer = await stack.ask("too large", png(2000, 2000), **wide)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "item_too_large")
            assert (await stack.counters(encoder))["encoded"] == encoded + expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([5, 151655], "prompt[1]"),
        ([[1], [2, 151652, 3]], "prompt[1][1]"),
        ([5, 151655.0], "prompt[1]"),
        ([5, "151655"], "prompt[1]"),
    ],
)
async def test_ids_of_media_tokens_are_reserved(sim: SimStack, prompt: object, param: str) -> None:
    before = await sim.counters(sim.pds[0])
    body = {"model": sim.model, "prompt": prompt}
    answer = await sim.http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert await sim.counters(sim.pds[0]) == before, "the gateway knows it itself"
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("reserved_token", param)


async def test_ids_of_chat_tokens_are_a_templates_work(sim: SimStack) -> None:
    for prompt in ([5, 151644, 151645], "151655", ["151655", "x"]):
        body = {"model": sim.model, "prompt": prompt}
        answer = await sim.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
async def sim(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SimStack]:
    async with sim_stack(nats_url, redis_url, tmp_path_factory.mktemp("sim")) as stack:
        await stack.start(encoders=1)
        yield stack
