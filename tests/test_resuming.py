"""An answer that had begun goes on elsewhere when its PD worker is lost: the client sees one answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from direct import Inbox, direct_job, publish, take
from epd_cli.stack import Stack, StackOptions, run_stack
from epd_common.bus import declare_consumers, declare_streams
from epd_common.engines import Told
from epd_common.errors import BadRequestError, UnavailableError, UpstreamError
from epd_common.protocol import (
    Progress,
    ReplyData,
    ReplyEnd,
    ReplyError,
    ReplyHead,
    ResumeRequest,
    subjects,
)
from epd_common.protocol.codec import encode
from epd_common.replies import Reply, ReplyHub
from epd_pd.resuming import may_go_on
from epd_sim.answers import expected_answer, token_of
from epd_sim.request import read_request
from leftovers import queued
from service_stack import BOUND_S, CHAT, eventually, image_part, picture, stream_text
from sim_stack import SimStack, sim_stack

LONG = 60
"""Tokens of an answer that is interrupted."""


# -- what can be gone on with ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "may"),
    [
        ({}, True),
        ({"max_tokens": 5, "temperature": 0.7, "seed": 1, "stop": ["x"], "user": "u"}, True),
        ({"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}}, True),
        ({"presence_penalty": 0, "frequency_penalty": 0.0, "top_logprobs": 0, "n": None}, True),
        ({"n": 2}, False),
        ({"logprobs": True}, False),
        ({"logprobs": 0}, False),
        ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": -1}, False),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"structured_outputs": {"regex": "a+"}}, False),
        ({"bad_words": ["x"]}, False),
        ({"prompt": ["a", "b"]}, False),
        ({"an_option_of_tomorrow": 1}, False),
    ],
)
def test_options_with_which_an_answer_may_go_on(options: dict[str, Any], may: bool) -> None:
    body = {"model": "m", "messages": [], "stream": True, **options}
    assert may_go_on(body) is may


# -- the requester -----------------------------------------------------------------------------------


def reply_of(*frames: Any) -> Reply:
    reply = Reply(cast(Any, None), "r", time.monotonic() + BOUND_S)
    reply.submitted = True
    for frame in frames:
        reply.offer(frame)
    return reply


def head(attempt: int = 1, kind: str = "text/event-stream; charset=utf-8") -> ReplyHead:
    return ReplyHead(request_id="r", attempt=attempt, seq=0, status=200, content_type=kind)


def data(seq: int, text: bytes, *tokens: int, attempt: int = 1, finish: str = "") -> ReplyData:
    return ReplyData(
        request_id="r", attempt=attempt, seq=seq, data=text, tokens=list(tokens), finish=finish
    )


def end(seq: int, attempt: int = 1) -> ReplyEnd:
    return ReplyEnd(request_id="r", attempt=attempt, seq=seq)


def asked(attempt: int) -> ResumeRequest:
    return ResumeRequest(request_id="r", attempt=attempt)


async def whole(reply: Reply) -> bytes:
    await reply.head()
    return b"".join([piece async for piece in reply.data()])


async def test_a_stream_goes_on_behind_what_came_in_order() -> None:
    reply = reply_of(head(), data(1, b"a", 7), data(2, b"b", 8, 9), data(4, b"d", 11))
    progress = reply.resume(asked(2))
    assert progress == Progress(
        request_id="r", attempt=2, seq=3, tokens=[[7], [8, 9]], last=b"b", finish=""
    )
    assert reply.resume(asked(2)) == progress, "the question may come twice"
    assert reply.resume(asked(1)) is None
    for frame in (
        data(3, b"OLD", 10),  # of the worker that was only slow
        data(3, b"c", 10, attempt=2, finish="stop"),
        data(4, b"d", attempt=2),
        end(5, attempt=2),
    ):
        reply.offer(frame)
    assert await whole(reply) == b"abcd"


async def test_the_second_of_three_workers_is_lost_too() -> None:
    reply = reply_of(head(), data(1, b"a", 7))
    reply.resume(asked(2))
    reply.offer(data(2, b"b", 8, attempt=2))
    progress = reply.resume(asked(3))
    assert progress is not None
    assert (progress.seq, progress.tokens, progress.last) == (3, [[7], [8]], b"b")
    reply.offer(end(3, attempt=3))
    assert await whole(reply) == b"ab"


async def test_an_answer_that_is_no_stream_begins_anew_until_it_is_whole() -> None:
    reply = reply_of(head(kind="application/json"), data(1, b"half of it"))
    taking = asyncio.create_task(whole(reply))
    await asyncio.sleep(0)  # the reader waits
    assert reply.resume(asked(2)) == Progress(request_id="r", attempt=2)
    for frame in (head(2, "application/json"), data(1, b"{}", attempt=2), end(2, attempt=2)):
        reply.offer(frame)
    assert await taking == b"{}"


async def test_a_worker_that_begins_a_stream_anew_fails_it_once_it_was_seen() -> None:
    reply = reply_of(head(), data(1, b"a", 7))
    await reply.head()
    reply.offer(head(attempt=2))
    with pytest.raises(UpstreamError, match="was lost after its answer had begun"):
        [piece async for piece in reply.data()]


async def resumed_too_late() -> Reply:
    """Its client has seen a part, and the next worker begins anew, as it did not hear of that in time."""
    reply = reply_of(head(), data(1, b"the ", 1), data(2, b"cat ", 2), data(3, b"sat ", 3))
    await reply.head()
    assert reply.resume(asked(2)) is not None
    reply.offer(head(attempt=2))
    return reply


async def test_two_answers_are_not_joined() -> None:
    reply = await resumed_too_late()
    for seq, word in enumerate((b"my ", b"dog ", b"ran ", b"away"), 1):
        reply.offer(data(seq, word, seq, attempt=2))
    reply.offer(end(5, attempt=2))
    with pytest.raises(UpstreamError) as caught:
        [piece async for piece in reply.data()]
    assert caught.value.code == "worker_lost"
    assert reply.given_up, "the worker is told to stop"


async def test_an_error_of_a_worker_that_knows_nothing_of_the_answer_ends_it() -> None:
    reply = reply_of(head(), data(1, b"the ", 1), data(2, b"cat ", 2))
    await reply.head()
    reply.resume(asked(2))
    failed = ReplyError(request_id="r", attempt=2, seq=0, status=503, code="gone", message="gone")
    reply.offer(failed)
    with pytest.raises(UnavailableError) as caught:
        [piece async for piece in reply.data()]
    assert caught.value.code == "gone"


async def test_a_worker_may_begin_anew_before_anything_was_seen() -> None:
    reply = reply_of(head(), data(1, b"a", 7), head(attempt=2), data(1, b"b", 8, attempt=2))
    reply.offer(end(2, attempt=2))
    assert await whole(reply) == b"b"


async def test_who_has_gone_says_nothing() -> None:
    reply = reply_of(head(), data(1, b"a", 7), end(2))
    assert await whole(reply) == b"a"
    assert reply.resume(asked(2)) is None


# -- the simulated engine ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"n": 2}, {"max_tokens": 1}])
def test_tokens_that_cannot_have_been_told_are_refused(options: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, **options}
    request = read_request(CHAT, body, [], max_model_len=1000, max_num_seqs=4)
    with pytest.raises(BadRequestError, match="2 tokens cannot have been told"):
        request.go_on(Told(((1,), (2,))))


# -- services, in this process -----------------------------------------------------------------------


@pytest.fixture
async def bare(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[SimStack]:
    async with sim_stack(nats_url, redis_url, tmp_path) as made:
        yield made


def events_of(raw: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in raw.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def interrupted(stack: SimStack, body: dict[str, Any], **second: Any) -> str:
    """A stream whose worker's engine dies at its tenth step; another worker comes after that."""
    await stack.add_pd(sim_die_at=10)
    await stack.start(pds=0)
    asking = asyncio.create_task(stack.http.post(CHAT, json=body))
    await eventually(stack.pds[0].process.task.done, "the worker ends with its engine")
    await stack.add_pd(**second)
    response = await asking
    assert response.status_code == 200
    return response.text


@pytest.mark.slow
async def test_the_client_sees_one_answer(bare: SimStack) -> None:
    one = picture()
    body = bare.body("x", one, stream=True, max_tokens=LONG, ignore_eos=True)
    body["stream_options"] = {"include_usage": True}
    raw = await interrupted(bare, body)
    events = events_of(raw)
    said = "".join(event["choices"][0]["delta"]["content"] for event in events[:-1])
    assert said == expected_answer(body, [one])
    assert len(events) == LONG + 2, "an opening, a token each, usage"
    assert len({(event["id"], event["created"]) for event in events}) == 1
    assert [e["choices"][0]["finish_reason"] for e in events if e["choices"]][-1] == "length"
    prompt_tokens = events[-1]["usage"]["prompt_tokens"]
    assert events[-1]["usage"]["completion_tokens"] == LONG
    undisturbed = await bare.http.post(CHAT, json=body)
    assert events_of(undisturbed.text)[-1]["usage"]["prompt_tokens"] == prompt_tokens
    counters = await bare.counters(bare.pds[1])
    assert (counters["resumed"], counters["answered"]) == (1, 2)


@pytest.mark.slow
async def test_the_second_worker_continues_the_tokens_and_not_its_own_answer(
    bare: SimStack,
) -> None:
    """The simulated engine says again what was told, whatever it would have said itself."""
    inbox = await Inbox().listen(bare.bus)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 4}
    right = expected_answer(body).split(" ")
    told = [[token_of("0badcafe")], [token_of(right[1])]]
    job = direct_job(bare, inbox, body=json.dumps(body).encode())
    piece = {"delta": {"content": f" {right[1]}"}}
    last = await last_event(bare, job.request_id, piece)
    await answer_as_requester(
        bare, inbox, lambda attempt: progress_of(job.request_id, attempt, told, last)
    )
    await begin_at_attempt_two(bare, job)
    await eventually(lambda: any(isinstance(f, ReplyEnd) for f in inbox.frames), "it ends")
    frames = [frame for frame in inbox.frames if isinstance(frame, ReplyData)]
    assert [frame.seq for frame in frames] == [3, 4, 5]
    text = stream_text(b"".join(frame.data for frame in frames).decode())
    assert text == " ".join(["", *right[2:]])


@pytest.mark.slow
async def test_pieces_that_are_not_what_was_sent_end_the_request(bare: SimStack) -> None:
    inbox = await Inbox().listen(bare.bus)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 4}
    job = direct_job(bare, inbox, body=json.dumps(body).encode())
    await answer_as_requester(
        bare, inbox, lambda attempt: progress_of(job.request_id, attempt, [[1], [2]], b"other")
    )
    await begin_at_attempt_two(bare, job)
    await eventually(lambda: any(isinstance(f, ReplyError) for f in inbox.frames), "it ends")
    error = inbox.frames[-1]
    assert (error.code, error.seq, error.attempt) == ("worker_lost", 3, 2)


@pytest.mark.slow
async def test_a_requester_that_knows_no_such_question_gets_it_from_the_beginning(
    bare: SimStack,
) -> None:
    inbox = await Inbox().listen(bare.bus)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 4}
    job = direct_job(bare, inbox, body=json.dumps(body).encode())
    await begin_at_attempt_two(bare, job)
    await eventually(lambda: any(isinstance(f, ReplyEnd) for f in inbox.frames), "it ends")
    questions = [frame for frame in inbox.frames if isinstance(frame, ResumeRequest)]
    frames = [frame for frame in inbox.frames if not isinstance(frame, ResumeRequest)]
    assert len(questions) > 1
    assert [frame.seq for frame in frames] == list(range(len(frames)))
    text = stream_text(b"".join(f.data for f in frames if isinstance(f, ReplyData)).decode())
    assert text == expected_answer(body)


@pytest.mark.slow
async def test_an_answer_that_cannot_go_on_ends_in_an_error_event(bare: SimStack) -> None:
    raw = await interrupted(bare, bare.body("x", stream=True, max_tokens=LONG, n=2))
    error = events_of(raw)[-1]["error"]
    assert error["code"] == "worker_lost"
    assert events_of(raw)[0]["choices"], "it had begun"


@pytest.mark.slow
async def test_an_answer_that_nobody_waits_for_is_not_gone_on_with(bare: SimStack) -> None:
    """Its requester has gone without a word that was heard; asked, it says so."""
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 4}
    async with ReplyHub(bare.bus) as hub:
        job = direct_job(bare, hub.inbox("gone"), body=json.dumps(body).encode())
        job = msgspec.structs.replace(job, request_id="gone")
        await begin_at_attempt_two(bare, job)
        await eventually(
            lambda: _counted(bare, bare.pds[0], "cancelled", 1), "the request is given up"
        )
    assert "answered" not in await bare.counters(bare.pds[0])


@pytest.mark.slow
async def test_a_worker_that_is_shut_down_hands_its_answers_over(bare: SimStack) -> None:
    bare.pd_time.passing.clear()
    first = await bare.add_pd(drain_s=0.2)
    await bare.start(pds=0)
    body = bare.body("x", stream=True, max_tokens=LONG, ignore_eos=True)
    told: list[str] = []

    async def read() -> None:
        async with bare.http.stream("POST", CHAT, json=body) as response:
            async for piece in response.aiter_text():
                told.append(piece)

    asking = asyncio.create_task(read())
    await eventually(lambda: _busy(bare, first), "it is begun")
    bare.pd_time.hold_after = 10
    bare.pd_time.passing.set()
    # Pieces that come at the same time are one text.
    await eventually(lambda: "".join(told).count("data: ") > 1, "some of it was told")
    assert not asking.done()
    await first.process.stop()
    bare.pd_time.passing.set()
    second = await bare.add_pd()
    await asking
    assert stream_text("".join(told)) == expected_answer(body)
    assert (await bare.counters(second))["resumed"] == 1


@pytest.mark.slow
async def test_a_worker_that_was_only_slow_leaves_the_request_to_the_next_one(
    bare: SimStack,
) -> None:
    """It hears that another attempt has begun, stops, and does not take that one's job off the queue."""
    bare.pd_time.passing.clear()
    slow = await bare.add_pd()
    await bare.start(pds=0)
    inbox = await Inbox().listen(bare.bus)
    job = direct_job(bare, inbox)
    await publish(bare, "generate", encode(job))
    await eventually(lambda: _busy(bare, slow), "it is begun")
    for attempt in (1, 2):
        progress = Progress(request_id=job.request_id, attempt=attempt)
        await bare.bus.emit(subjects.progress_subject(job.request_id), progress)
    await eventually(lambda: _counted(bare, slow, "taken_over", 1), "it lets go")
    assert slow.engine._inside == {} and inbox.frames == []
    assert await queued(bare, "generate") == 1
    bare.pd_time.passing.set()  # nobody else has it in truth, so it comes back
    await eventually(lambda: any(isinstance(f, ReplyEnd) for f in inbox.frames), "it is answered")


async def _counted(stack: SimStack, worker: Any, name: str, count: int) -> bool:
    try:
        return (await stack.counters(worker)).get(name, 0) >= count
    except Exception:  # it is not there yet
        return False


async def _busy(stack: SimStack, worker: Any) -> bool:
    return await stack.busy(worker) > 0


def progress_of(request_id: str, attempt: int, tokens: list[list[int]], last: bytes) -> Progress:
    seq = len(tokens) + 1
    return Progress(request_id=request_id, attempt=attempt, seq=seq, tokens=tokens, last=last)


async def last_event(stack: SimStack, request_id: str, content: dict[str, Any]) -> bytes:
    """The event in which a simulated engine says this."""
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": None}
    event = {
        "id": f"chatcmpl-{request_id}",
        "created": 1,
        "model": stack.model,
        "object": "chat.completion.chunk",
        "choices": [choice],
    }
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


async def answer_as_requester(stack: SimStack, inbox: Inbox, progress: Any) -> None:
    """Answer the question at an inbox, as the client of another language would."""

    async def on_message(message: Any) -> None:
        for frame in inbox.frames:
            if isinstance(frame, ResumeRequest):
                subject = subjects.progress_subject(frame.request_id)
                await stack.bus.emit(subject, progress(frame.attempt))
                return

    await stack.bus.subscribe(inbox.subject, on_message)
    await stack.bus.flush()


async def begin_at_attempt_two(stack: SimStack, job: Any) -> None:
    """Start a worker that gets a job which somebody had before and gave back."""
    await declare_streams(stack.bus, max_jobs=1000)
    consumer, *_ = await declare_consumers(stack.bus, "generate", stack.model)
    await publish(stack, "generate", encode(job))
    message = await take(stack.bus, subjects.GENERATE_STREAM, consumer)
    await message.nak()
    await stack.add_pd()


# -- processes ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def processes(folder: Path) -> AsyncIterator[Stack]:
    options = StackOptions(
        engine="sim",
        model="sim",
        served_model="sim",
        pds=2,
        port=0,
        state_dir=folder,
        environment={"EPD_SIM_PROFILE": "qwen2.5-vl-7b-h100", "EPD_SIM_TIME_SCALE": "4"},
    )
    async with run_stack(options, lambda view: None) as stack:
        yield stack


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_process_that_is_killed_or_frozen(tmp_path: Path, how: str) -> None:
    """Its job comes back by its missing heartbeats. One that was frozen goes on later, and is not heard."""
    one = picture()
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": [image_part(one), {"type": "text", "text": "x"}]}],
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
    }
    async with (
        processes(tmp_path) as stack,
        httpx.AsyncClient(base_url=stack.gateway_url, timeout=BOUND_S * 3) as http,
        http.stream("POST", CHAT, json=body) as response,
    ):
        worker = response.headers["x-epd-worker"]
        service = next(s for s in stack.services if s.worker_id == worker)
        raw = b""
        stopped = False
        async for piece in response.aiter_bytes():
            raw += piece
            if raw.count(b"\n\n") > 5 and not stopped:
                service.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                stopped = True
            if raw.count(b"\n\n") > 100 and stopped and how == "frozen":
                service.signal(signal.SIGCONT)
        assert stopped
    assert stream_text(raw.decode()) == expected_answer(body, [one])
