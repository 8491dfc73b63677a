"""Encode, prefill and decode on workers of their own, on real brokers and simulated engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from direct import Inbox, direct_job, publish, take
from epd_cli.connect import operator_bus
from epd_cli.stack import Stack, StackOptions, run_stack
from epd_common.bus import Bus, declare_consumers, declare_streams
from epd_common.bus.delivery import Delivery
from epd_common.bus.streams import MAX_DELIVERIES
from epd_common.engines import AnswerHead, AnswerPart, AnswerPiece, KvLostError
from epd_common.health import ask_health
from epd_common.ingest.body import CHAT, COMPLETIONS
from epd_common.protocol import (
    Handover,
    ReplyData,
    ReplyEnd,
    ReplyHead,
    encode,
    subjects,
)
from epd_pd.handing_over import SplitPolicy, can_be_split
from epd_pd.loading import CLOCKS_S, believable_s, in_time
from epd_pd.other_places import to_look_into
from epd_sim.answers import expected_answer
from leftovers import leftovers, queued
from service_stack import BOUND_S, Worker, eventually, image_part, picture, stream_text
from sim_stack import SimStack, sim_stack

LONG = 200
"""Tokens of an answer that somebody dies in the middle of."""

# -- policies ----------------------------------------------------------------------------------------


def test_long_prompts_are_split_and_short_ones_where_there_are_many() -> None:
    policy = SplitPolicy(tokens=500, whole=2)
    assert policy.splits(500, whole_now=0)
    assert not policy.splits(499, whole_now=1)
    assert policy.splits(1, whole_now=2)


@pytest.mark.parametrize(
    ("route", "options", "can"),
    [
        (CHAT, {"messages": [], "stream": True, "logprobs": True, "tools": [{}], "n": 1}, True),
        (CHAT, {"n": 2}, False),
        (CHAT, {"use_beam_search": True}, False),
        (CHAT, {"prompt_logprobs": 0}, False),
        (COMPLETIONS, {"prompt": "x", "best_of": 1}, True),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, True),
        (COMPLETIONS, {"prompt": ["a", "b"]}, False),
        (COMPLETIONS, {"prompt": [[1], [2]]}, False),
        (COMPLETIONS, {"prompt": "x", "echo": True}, False),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, False),
    ],
)
def test_what_can_be_split(route: str, options: dict[str, Any], can: bool) -> None:
    assert can_be_split(route, options) is can


def test_a_handover_is_believed_within_its_lease_and_once() -> None:
    handover = Handover(worker="p", attempt=1, lease_s=30, params={})
    assert believable_s(handover, delivered=1, queued_s=3) == 27 - CLOCKS_S
    assert believable_s(handover, delivered=1, queued_s=29) < 0
    assert believable_s(handover, delivered=2, queued_s=0) == 0


def test_decode_jobs_are_anybodys_only_where_nobody_decodes() -> None:
    holding = {"any", "decode", "w"}
    assert to_look_into("w", holding, {"w"}, decoders=True) == []
    assert to_look_into("w", holding, {"w"}, decoders=False) == ["decode"]


async def answering(
    wait: Callable[[], Any] | None = None,
) -> AsyncGenerator[AnswerPart, None]:
    if wait is not None:
        await wait()
    yield AnswerHead(200, "a/b")
    yield AnswerPiece(b"x")


async def test_an_answer_in_time() -> None:
    parts = in_time(answering(), within_s=BOUND_S, alive=lambda: True)
    assert [part async for part in parts] == [AnswerHead(200, "a/b"), AnswerPiece(b"x")]


async def test_an_answer_that_comes_too_late() -> None:
    """It is there when it is looked at, and could be of anything by then."""
    answer = answering()
    with pytest.raises(KvLostError):
        await anext(in_time(answer, within_s=0.0, alive=lambda: True))


async def test_an_answer_that_does_not_come() -> None:
    never = asyncio.Event()
    with pytest.raises(KvLostError, match="lease"):
        await anext(in_time(answering(never.wait), within_s=0.3, alive=lambda: True))


async def test_an_answer_whose_prefill_worker_goes() -> None:
    never = asyncio.Event()
    lives = iter((True, False))
    with pytest.raises(KvLostError, match="gone"):
        await anext(in_time(answering(never.wait), within_s=BOUND_S, alive=lambda: next(lives)))


# -- services ----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def three(
    nats_url: str,
    redis_url: str,
    folder: Path,
    *,
    decode: dict[str, Any] | None = None,
    **more: Any,
) -> AsyncIterator[SimStack]:
    """One worker of each; all prompts are handed over, however short."""
    async with sim_stack(nats_url, redis_url, folder) as stack:
        stack.settings |= {"split_tokens": 0, **more}
        await stack.add_pd(pd_role="prefill")
        await stack.add_pd(pd_role="decode", **(decode or {}))
        await stack.start(pds=0)
        await until_roles(stack, prefills=1, decodes=1)
        yield stack


async def until_roles(stack: SimStack, *, prefills: int, decodes: int) -> None:
    await eventually(
        lambda: (
            len(stack.registry.decoding(stack.model)) == decodes
            and len(stack.registry.answering(stack.model)) == prefills
        ),
        "all have their roles",
    )


async def counters(stack: SimStack, worker: Worker) -> Counter[str]:
    return Counter(await stack.counters(worker))


async def ask(stack: SimStack, text: str, *pictures: bytes, **fields: Any) -> dict[str, Any]:
    """An answer, which is right."""
    answer = await stack.ask(text, *pictures, **fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    body = stack.body(text, *pictures, **fields)
    for choice in found["choices"]:
        expected = expected_answer(body, pictures, choice=choice["index"])
        assert choice["message"]["content"] == expected
    return found


async def test_a_prompt_is_handed_over(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    async with three(nats_url, redis_url, tmp_path) as stack:
        prefill, decoder = stack.pds
        sent: list[bytes] = []
        for count in range(4):
            pictures = [picture() for _ in range(count)]
            sent += pictures
            await ask(stack, f"number {count}", *pictures)
        assert (await counters(stack, prefill))["handed_over"] == 4
        assert not (await counters(stack, prefill))["answered"]
        found = await counters(stack, decoder)
        assert (found["answered"], found["kv_loaded"], found["kv_lost"]) == (4, 4, 0)
        assert found["arena_hits"] == 0, "it needs no embeddings"
        assert len(prefill.engine._kept_prompts) == 0, "what was read is given up"
        await eventually_nothing_left(stack, sent)


async def eventually_nothing_left(stack: SimStack, sent: list[bytes]) -> None:
    async def nothing() -> bool:
        return await leftovers(stack, list(map(stack.key, sent))) == {}

    await eventually(nothing, "nothing is left of the requests")


async def test_streams_and_receipts(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    async with three(nats_url, redis_url, tmp_path) as stack:
        prefill, decoder = stack.pds
        inbox = await Inbox().listen(stack.bus)
        pictures = [picture(), picture()]
        options = {"max_tokens": 40, "ignore_eos": True}
        async with stack.streaming("streamed", *pictures, **options) as response:
            told = (await response.aread()).decode()
        body = stack.body("streamed", *pictures, stream=True, **options)
        assert stream_text(told) == expected_answer(body, pictures)
        await publish(stack, "generate", encode(direct_job(stack, inbox)))
        receipt = (await inbox.end()).receipt
        assert receipt is not None
        assert (receipt.worker, receipt.attempt) == (decoder.id, 2)
        assert receipt.loaded_tokens > 0
        assert receipt.prefill is not None
        assert (receipt.prefill.worker, receipt.prefill.attempt) == (prefill.id, 1)
        assert receipt.prefill.first_s is not None and receipt.prefill.prefill is None


@pytest.mark.slow
async def test_what_is_answered_where_it_is_prefilled(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with three(nats_url, redis_url, tmp_path, split_tokens=400, split_whole=1) as stack:
        prefill, decoder = stack.pds
        await ask(stack, "short")
        await ask(stack, "several " + "long " * 500, n=2)
        await ask(stack, "long " * 500)
        assert (await counters(stack, prefill))["answered"] == 2
        assert (await counters(stack, decoder))["answered"] == 1
        # While it answers one short prompt, others go on to who decodes.
        stack.pd_time.passing.clear()
        first = asyncio.create_task(ask(stack, "first"))
        await eventually(lambda: bool(prefill.engine._inside), "it is begun")
        second = asyncio.create_task(ask(stack, "second"))
        await eventually(lambda: len(prefill.engine._inside) == 2, "both are begun")
        stack.pd_time.passing.set()
        await asyncio.gather(first, second)
        assert (await counters(stack, prefill))["answered"] == 3
        assert (await counters(stack, decoder))["answered"] == 2


@pytest.mark.slow
async def test_a_job_that_comes_again_goes_the_same_way(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """It may be handed over already: the queue drops a second decode job, and nobody answers twice."""
    async with three(nats_url, redis_url, tmp_path, split_tokens=400) as stack:
        inbox = await Inbox().listen(stack.bus)
        for worker in stack.pds:
            await worker.process.stop()
        job = direct_job(stack, inbox)
        await publish(stack, "generate", encode(job))
        consumer = subjects.generate_consumer(stack.model, "l0")
        await (await take(stack.bus, subjects.GENERATE_STREAM, consumer)).nak()
        stack.pds.clear()
        decoder = await stack.add_pd(pd_role="decode")
        await eventually(lambda: bool(stack.registry.decoding(stack.model)), "somebody decodes")
        prefill = await stack.add_pd(pd_role="prefill")
        await inbox.end()
        assert (await counters(stack, prefill))["handed_over"] == 1
        assert (await counters(stack, decoder))["answered"] == 1


@pytest.mark.slow
async def test_nobody_decodes(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    """Then prefill workers do all, and what was handed over before."""
    async with three(nats_url, redis_url, tmp_path) as stack:
        prefill, decoder = stack.pds
        stack.pd_time.passing.clear()
        one = picture()
        asking = asyncio.create_task(ask(stack, "handed over", one))
        await eventually(lambda: bool(prefill.engine._inside), "it is begun")
        await decoder.process.stop()
        stack.pd_time.passing.set()
        await asking
        await ask(stack, "not handed over")
        found = await counters(stack, prefill)
        assert found["answered"] + found["handed_over"] >= 2 and found["answered"] >= 2


@pytest.mark.slow  # until a job is delivered again
async def test_a_lost_acknowledgement_lets_two_workers_answer_as_two_attempts(
    nats_url: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job comes once more, when its decode job is being answered and no decode worker takes more."""
    lost: list[str] = []
    acknowledge = Delivery.ack

    async def lose_one(self: Delivery) -> None:
        if subjects.place_of(self.subject) == subjects.ANY_PLACE and not lost:
            lost.append(self.subject)
            self.leave()
        else:
            await acknowledge(self)

    monkeypatch.setattr(Delivery, "ack", lose_one)
    async with three(nats_url, redis_url, tmp_path) as stack:
        prefill, decoder = stack.pds
        stack.pd_time.real_s = 0.02
        inbox = await Inbox().listen(stack.bus)
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "stream": True,
            "max_tokens": LONG,
            "ignore_eos": True,
        }
        await publish(
            stack, "generate", encode(direct_job(stack, inbox, body=json.dumps(body).encode()))
        )
        await eventually(lambda: len(inbox.frames) > 5, "an answer is told")
        stopping = asyncio.create_task(decoder.process.stop())

        def ends() -> int:
            return sum(isinstance(frame, ReplyEnd) for frame in inbox.frames)

        await eventually(lambda: ends() == 2, "both end", BOUND_S * 4)
        await stopping
        assert (await counters(stack, prefill))["answered"] == 1
        heads = {f.attempt: f.worker for f in inbox.frames if isinstance(f, ReplyHead)}
        # The later attempt is the one whose frames came first, so that nobody shows any of the other's.
        assert heads == {MAX_DELIVERIES + 1: decoder.id, 2: prefill.id}
        frames = [f for f in inbox.frames if isinstance(f, ReplyHead | ReplyData | ReplyEnd)]
        assert len({(f.attempt, f.seq) for f in frames}) == len(frames)


@pytest.mark.slow
async def test_a_decode_job_that_nobody_is_left_for(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Prefilled, handed over, and no decode worker ever comes: a worker of another role answers it."""
    async with sim_stack(nats_url, redis_url, tmp_path) as stack:
        await declare_streams(stack.bus, max_jobs=1000)
        await declare_consumers(stack.bus, "generate", stack.model, subjects.DECODE_PLACE)
        inbox = await Inbox().listen(stack.bus)
        job = direct_job(stack, inbox)
        handover = Handover(
            worker="gone", attempt=3, lease_s=30, params={"host": "127.0.0.1", "port": 9}
        )
        await stack.bus.store(
            subjects.generate_subject(stack.model, "l0", subjects.DECODE_PLACE),
            msgspec.structs.replace(job, handover=handover),
            message_id=job.request_id,
        )
        await stack.start()
        await inbox.end()
        assert {frame.attempt for frame in inbox.frames} == {MAX_DELIVERIES + 1}
        assert (await counters(stack, stack.pds[0]))["kv_lost"] == 1


@pytest.mark.slow
async def test_a_handover_that_a_client_made_up(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """It would name the memory that is read, and whose."""
    async with three(nats_url, redis_url, tmp_path) as stack:
        inbox = await Inbox().listen(stack.bus)
        handover = Handover(
            worker="me", attempt=1, lease_s=30, params={"host": "127.0.0.1", "port": 1}
        )
        job = msgspec.structs.replace(direct_job(stack, inbox), handover=handover)
        await publish(stack, "generate", encode(job))
        error = await inbox.error()
        assert error.code == "malformed_message" and "handover" in error.message


@pytest.mark.slow
async def test_a_handover_that_does_not_fit(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    """The job alone fits into a message; so the prefill worker answers."""
    async with three(nats_url, redis_url, tmp_path) as stack:
        inbox = await Inbox().listen(stack.bus)
        job = direct_job(stack, inbox)
        room = stack.bus.max_payload_bytes - len(encode(job)) - 100
        padded = msgspec.json.decode(job.body) | {"metadata": {"x": "a" * room}}
        job = msgspec.structs.replace(job, body=msgspec.json.encode(padded))
        assert stack.bus.max_payload_bytes - 200 < len(encode(job)) <= stack.bus.max_payload_bytes
        await publish(stack, "generate", encode(job))
        await inbox.end()
        assert (await counters(stack, stack.pds[0]))["answered"] == 1


async def between_the_stages(
    stack: SimStack, *pictures: bytes
) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
    """A request that fills the decode worker, and one about pictures that is handed over and waits for it."""
    prefill, decoder = stack.pds
    stack.pd_time.real_s = 0.005
    long = asyncio.create_task(ask(stack, "long", max_tokens=LONG, ignore_eos=True))
    await eventually(lambda: bool(decoder.engine._inside), "the decode worker is full")
    waiting = asyncio.create_task(ask(stack, "waits", *pictures))

    async def handed_over() -> bool:
        return (await counters(stack, prefill))["handed_over"] == 2

    await eventually(handed_over, "it waits for a decode worker")
    return long, waiting


@pytest.mark.slow
async def test_a_request_that_is_cancelled_between_the_stages(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with three(nats_url, redis_url, tmp_path, decode={"pd_slots": 1}) as stack:
        decoder = stack.pds[1]
        one = picture()
        long, asking = await between_the_stages(stack, one)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await long

        async def dropped() -> bool:
            found = await counters(stack, decoder)
            return found["cancelled"] == 1 and await queued(stack, "generate") == 0

        await eventually(dropped, "nobody answers it")
        assert (await counters(stack, decoder))["kv_loaded"] == 1
        await eventually_nothing_left(stack, [one])


@pytest.mark.slow
async def test_a_prompt_that_was_given_up_meanwhile(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """The prefill worker has forgotten it: the decode worker gets the embeddings and prefills it itself."""
    async with three(nats_url, redis_url, tmp_path, decode={"pd_slots": 1}) as stack:
        prefill, decoder = stack.pds
        one, two = picture(), picture()
        long, asking = await between_the_stages(stack, one, two)
        prefill.engine._kept_prompts._kept.clear()
        await asyncio.gather(long, asking)
        found = await counters(stack, decoder)
        assert (found["kv_loaded"], found["kv_lost"], found["answered"]) == (1, 1, 2)
        await eventually_nothing_left(stack, [one, two])


# -- processes ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def processes(folder: Path) -> AsyncIterator[Stack]:
    options = StackOptions(
        engine="sim",
        model="sim",
        served_model="sim",
        pds=0,
        prefills=2,
        decodes=2,
        port=0,
        state_dir=folder,
        environment={
            "EPD_SIM_PROFILE": "qwen2.5-vl-7b-h100",
            "EPD_SIM_TIME_SCALE": "4",
            "EPD_SPLIT_TOKENS": "0",
        },
    )
    async with run_stack(options, lambda view: None) as stack:
        yield stack


async def begun_by(bus: Bus, *workers: str) -> str:
    """Which of these works on something; waits until one does."""
    found: list[str] = []

    async def begun() -> bool:
        for worker in workers:
            health: Any = await ask_health(bus, worker)
            found.extend([worker] * (health["busy"] > 0))
        return bool(found)

    await eventually(begun, "somebody works on it")
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_worker_is_killed(tmp_path: Path, victim: str) -> None:
    """The prefill worker while it prefills, or the decode worker in the middle of an answer."""
    one = picture((1000, 1000))
    content = [image_part(one), {"type": "text", "text": "x " * 4000}]
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": LONG,
        "ignore_eos": True,
        "stream": True,
    }
    async with (
        processes(tmp_path) as stack,
        httpx.AsyncClient(base_url=stack.gateway_url, timeout=BOUND_S * 3) as http,
    ):
        if victim == "prefill":
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            async with operator_bus(stack.nats_url, name="test") as bus:
                name = await begun_by(bus, "prefill-1", "prefill-2")
            next(s for s in stack.services if s.worker_id == name).signal(signal.SIGKILL)
            raw = (await asking).text
        else:
            raw, killed = "", False
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                worker = response.headers["x-epd-worker"]
                assert worker.startswith("decode")
                async for piece in response.aiter_text():
                    raw += piece
                    if raw.count("\n\n") > 5 and not killed:
                        killed = True
                        service = next(s for s in stack.services if s.worker_id == worker)
                        service.signal(signal.SIGKILL)
            assert killed
        assert stream_text(raw) == expected_answer(body, [one])
