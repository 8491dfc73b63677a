"""``/v1/responses``: what is refused, how a stream ends, what it costs, and what a simulated engine says."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd_common.costs import Work, references, work_of, work_unseen
from epd_common.engines import AnswerHead, AnswerPiece, Placeholder
from epd_common.errors import BadRequestError, UpstreamError
from epd_common.ingest.body import CHAT, RESPONSES, extract
from epd_common.ingest.data_uri import make_data_uri
from epd_common.ingest.fitting import check_fits
from epd_common.ingest.reserved import check_reserved
from epd_common.protocol import Item, Media
from epd_gateway.stream_end import StreamEnd
from epd_pd.admission import text_before_first_item
from epd_pd.resuming import may_go_on
from epd_sim.answers import expected_answer
from epd_vllm.pd_engine import put_placeholders
from epd_vllm.responses import held_back, name_answer
from fake_engine import answer_text
from service_stack import BOUND_S, ServiceStack, bare_stack, eventually, picture, service_stack
from sim_stack import SimStack, sim_stack

URL = {"type": "input_image", "image_url": "https://x.example/a.png"}
REF = {"type": "media_ref", "item": 0}


def said(words: str) -> dict[str, Any]:
    return {"type": "input_text", "text": words}


def shown(data: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": make_data_uri(data)}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def asked(*items: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": list(items), **fields}


def output_text(answer: dict[str, Any]) -> str:
    return "".join(part["text"] for item in answer["output"] for part in item["content"])


def events_of(raw: str) -> list[dict[str, Any]]:
    """The events of a whole stream, each under its type and with its number."""
    *blocks, rest = raw.split("\n\n")
    assert rest == ""
    events = []
    for number, block in enumerate(blocks):
        named, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert named == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


# -- bodies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"background": 1}, "background"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [user(URL)], "truncation": "auto"}, "truncation"),
    ],
)
def test_what_cannot_be_right_across_workers_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        extract(RESPONSES, asked(user("x")) | fields, max_items=8)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


def test_what_is_null_is_left_out() -> None:
    """vLLM takes ``"truncation": null`` for a prompt that may be cut, and cannot answer others at all."""
    body = asked(user(URL), truncation=None, background=None, conversation=None, store=True)
    found = extract(RESPONSES, body | {"background": False}, max_items=8)
    assert set(found.body) == {"model", "input", "store", "background"}
    assert "truncation" not in found.body and "truncation" in body
    assert extract(RESPONSES, asked(user(URL), truncation="disabled"), max_items=8).parts


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (asked(user("a<|x|>")), "input[0].content[0]"),
        ({"input": "a<|x|>"}, "input"),
        (asked(user("a"), instructions="<|x|>"), "instructions"),
        (
            asked({"type": "function_call", "arguments": '{"a": "\\u003c|x|>"}'}),
            "input[0].arguments.a",
        ),
        (asked({"type": "function_call_output", "output": "<|x|>"}), "input[0].output"),
        (asked({"type": "reasoning", "summary": [{"text": "<|x|>"}]}), "input[0].summary[0].text"),
        (asked(user(said("<|"), REF, said("x|>"))), "input[0].content"),
        (
            asked(user("a"), text={"format": {"schema": {"title": "<|x|>"}}}),
            "text.format.schema.title",
        ),
    ],
)
def test_reserved_tokens_are_refused_wherever_they_stand(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        check_reserved(RESPONSES, body, ["<|x|>"])
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "work"),
    [
        (asked(user(said("x" * 40)), max_output_tokens=7), Work(10, 0, None, 7)),
        ({"input": "x" * 40, "instructions": "x" * 38}, Work(20, 0, None, 512)),
        (asked(user(said("x" * 40), URL, URL)), Work(10, 2, None, 512)),
        (asked(user({**URL, "image_url": "x" * 4000})), Work(0, 1, None, 512)),
        (asked({"type": "t", "output": [said("x" * 37), URL]}), Work(10, 1, None, 512)),
        (asked({"arguments": "x" * 38}), Work(10, 0, None, 512)),
        (asked("x", {"content": 7}, 7, max_output_tokens="x"), Work(0, 0, None, 512)),
        ({"input": 7, "max_output_tokens": 10**12}, Work(0, 0, None, 4096)),
        # Other routes' fields bound nothing here, and are text like any other.
        (asked(max_tokens=1, max_completion_tokens=1), Work(0, 0, None, 512)),
        (asked(messages=[{"content": [REF, {"type": "media_ref"}]}]), Work(16, 0, None, 512)),
    ],
)
def test_the_work_of_a_body(body: dict[str, Any], work: Work) -> None:
    assert work_unseen(RESPONSES, body, max_model_len=4096) == work


def test_an_input_in_a_chat_is_none() -> None:
    body = {"messages": [user("x" * 40)], "input": [user(URL, {"type": "media_ref"})]}
    assert references(CHAT, body) == []
    work = work_unseen(CHAT, body | {"max_output_tokens": 1}, max_model_len=4096)
    assert (work.media, work.answer) == (0, 512)


def test_the_work_of_a_prepared_body() -> None:
    item = Item(media=Media(ref="r"), width=280, height=280)
    body = asked(user(REF, said("x" * 8)), {"type": "t", "output": [REF]})
    work = work_of(RESPONSES, body, [item], [None], max_model_len=4096)
    assert (work.media, work.visual) == (2, 200)
    with pytest.raises(BadRequestError) as caught:
        check_fits([0], [200], max_model_len=100, max_item_rows=0, place="input")
    assert caught.value.param == "input"


def test_text_before_the_first_item() -> None:
    body = asked(user(said("12345")), user(said("678"), REF, said("and more")), instructions="90")
    assert text_before_first_item(RESPONSES, body) == 10
    assert text_before_first_item(RESPONSES, {"input": "12345", "instructions": 7}) == 5


def test_nobody_goes_on_with_such_a_stream() -> None:
    """Ids of its items are made up by the worker."""
    assert not may_go_on(asked(user("x"), stream=True))


# -- vLLM ------------------------------------------------------------------------------------------


def test_an_item_is_put_where_vllm_takes_it() -> None:
    """vLLM 0.32 checks the input's parts by the types of OpenAI's client, which know no embeddings."""
    body = asked(user(said("a"), REF), {"type": "function_call_output", "output": [REF]})
    put_placeholders(
        RESPONSES, body, [Placeholder("k", "image", {"image_grid_thw": [1, 2, 2]})], "f"
    )
    part = {
        "type": "input_image",
        "detail": "auto",
        "image_embeds": {"image_grid_thw": [1, 2, 2]},
        "uuid": "k",
    }
    assert body["input"][0]["content"] == [said("a"), part]
    assert body["input"][1]["output"] == [part]
    assert body["ec_transfer_params"] == {"k": {"fingerprint": "f"}}
    raw = asked(user(REF))
    put_placeholders(RESPONSES, raw, [Placeholder("k", "image", {}, b"GIF89a")], "f")
    assert raw["input"][0]["content"] == [
        {
            "type": "input_image",
            "detail": "auto",
            "image_url": make_data_uri(b"GIF89a"),
            "uuid": "k",
        }
    ]


def test_a_worker_names_the_answer_and_keeps_none() -> None:
    body = asked(user("x"), request_id="mine", store=True)
    name_answer(body, "r1")
    assert (body["request_id"], body["store"]) == ("resp_r1", False)


HEAD = AnswerHead(200, "text/event-stream")
CREATED = AnswerPiece(b"created")
FIRST, LAST = AnswerPiece(b"a", (1,)), AnswerPiece(b"b", (2,), "stop")


async def parts(*given: Any, pulled: list[Any]) -> AsyncGenerator[Any, None]:
    for part in given:
        pulled.append(part)
        if isinstance(part, Exception):
            raise part
        yield part


async def test_a_stream_begins_with_its_first_token() -> None:
    pulled: list[Any] = []
    held = held_back(parts(HEAD, CREATED, FIRST, LAST, pulled=pulled), request_id="r")
    assert await anext(held) == HEAD
    assert pulled == [HEAD, CREATED, FIRST]
    assert [part async for part in held] == [CREATED, FIRST, LAST]
    refused = (AnswerHead(400, "application/json"), AnswerPiece(b"{}"))
    again = held_back(parts(*refused, pulled=[]), request_id="r")
    assert [part async for part in again] == list(refused)


async def test_a_stream_that_vllm_breaks_off_has_a_status_or_an_error() -> None:
    early = held_back(parts(HEAD, CREATED, RuntimeError("x"), pulled=[]), request_id="r")
    head, told = [part async for part in early]
    assert head == AnswerHead(502, "application/json")
    assert json.loads(told.data)["error"]["code"] == "stage_failed"  # type: ignore[union-attr]
    late = held_back(parts(HEAD, FIRST, RuntimeError("x"), pulled=[]), request_id="r")
    assert [await anext(late), await anext(late)] == [HEAD, FIRST]
    with pytest.raises(UpstreamError, match="broke the answer off"):
        await anext(late)
    known = held_back(parts(HEAD, BadRequestError("y"), pulled=[]), request_id="r")
    with pytest.raises(BadRequestError):
        await anext(known)


# -- the end of a stream ---------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 100])
def test_an_error_event_counts_on_wherever_the_stream_was_cut(cut: int) -> None:
    raw = b"event: a\ndata: {}\n\nevent: b\ndata: {}\n\nevent: c\ndata: {}\n\n"
    end = StreamEnd(RESPONSES)
    for start in range(0, len(raw), cut):
        end.saw(raw[start : start + cut])
    named, data, *rest = end.by(UpstreamError("lost", code="worker_lost")).decode().split("\n")
    assert (named, rest) == ("event: error", ["", ""])
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "sequence_number": 3,
        "code": "worker_lost",
        "message": "lost",
        "param": None,
    }


def test_an_error_is_no_part_of_an_event_that_was_cut() -> None:
    end = StreamEnd(RESPONSES)
    end.saw(b"event: a\ndata: {}\n\nevent: b\nda")
    assert end.by(UpstreamError("lost")).startswith(b"\n\nevent: error\n")


# -- through all services --------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def stack(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServiceStack]:
    async with bare_stack(nats_url, redis_url, tmp_path_factory.mktemp("responses")) as running:
        await running.add_encoder()
        await running.add_pd()
        await running.add_gateway(max_items=4)
        await running.ready()
        yield running


@pytest.fixture(scope="module")
async def sim(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SimStack]:
    async with sim_stack(nats_url, redis_url, tmp_path_factory.mktemp("sim")) as running:
        await running.start()
        yield running


async def ask(stack: ServiceStack, *items: Any, **fields: Any) -> httpx.Response:
    return await stack.http.post(RESPONSES, json=asked(*items, **fields) | {"model": stack.model})


async def test_pictures_in_a_message_and_in_a_tools_output(stack: ServiceStack) -> None:
    one, two = picture(), picture()
    answer = await ask(
        stack,
        user(shown(one), said("and")),
        {"type": "function_call_output", "call_id": "c", "output": [shown(two)]},
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-epd-items"] == "encoded,encoded"
    whole = output_text(answer.json())
    assert whole == answer_text("", one) + "and" + answer_text("", two)


async def test_an_uploaded_file(stack: ServiceStack) -> None:
    data = picture()
    sent = {"file": ("a.png", data, "image/png")}
    file = (await stack.http.post("/v1/files", files=sent, data={"purpose": "vision"})).json()
    answer = await ask(stack, user({"type": "input_image", "file_id": file["id"]}))
    assert output_text(answer.json()) == answer_text("", data)


async def test_refusals_have_openais_shape(stack: ServiceStack) -> None:
    for items, fields, status, code in (
        ([user("x")], {"previous_response_id": "r"}, 400, "unsupported_parameter"),
        ([], {}, 400, "invalid_request"),
        ([user(*[shown(picture()) for _ in range(5)])], {}, 413, "too_many_items"),
    ):
        answer = await ask(stack, *items, **fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")],
)
async def test_no_answer_is_kept(stack: ServiceStack, method: str, path: str) -> None:
    found = await stack.http.request(method, f"{RESPONSES}/resp_1{path}")
    error = found.json()["error"]
    assert (found.status_code, error["code"], error["param"]) == (
        404,
        "response_not_found",
        "response_id",
    )


async def test_a_stream_that_fails_midway_ends_with_an_event_of_this_api(
    stack: ServiceStack,
) -> None:
    data = picture()
    pd = stack.pds[0]
    pd.engine.gate.clear()
    body = asked(user(shown(data)), stream=True) | {"model": stack.model}
    async with stack.http.stream("POST", RESPONSES, json=body) as response:
        pieces = response.aiter_text()
        seen = await anext(pieces)
        (pd.arena / "pins" / pd.id / stack.key(data)).write_bytes(b"no embedding")
        pd.engine.gate.set()
        seen += "".join([piece async for piece in pieces])
    created, error = events_of(seen)
    assert created["type"] == "response.created"
    assert set(error) == {"type", "sequence_number", "code", "message", "param"}
    assert error["type"] == "error"
    assert "shorter than an embedding's header" in error["message"]


async def test_a_worker_that_dies_midway_ends_the_stream_by_an_event_of_this_api(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with service_stack(nats_url, redis_url, tmp_path, encoders=0) as stack:
        dying = stack.pds[0]
        dying.engine.gate.clear()
        body = asked(user("never"), stream=True) | {"model": stack.model}
        async with stack.http.stream("POST", RESPONSES, json=body) as response:
            pieces = response.aiter_text()
            seen = await anext(pieces)
            dying.engine.die()
            seen += "".join([piece async for piece in pieces])
        *_, error = events_of(seen)
        assert (error["type"], error["code"]) == ("error", "worker_lost")
        await eventually(dying.process.task.done, "its process has ended")
        dying.process.task.exception()


async def test_a_client_that_goes_away_ends_the_request(stack: ServiceStack) -> None:
    engine = stack.pds[0].engine
    engine.gate.clear()
    closed = len(engine.closed)
    body = asked(user("long"), stream=True) | {"model": stack.model}
    async with stack.http.stream("POST", RESPONSES, json=body) as response:
        await anext(response.aiter_text())
    await eventually(lambda: len(engine.closed) > closed, "the engine is told", BOUND_S)
    engine.gate.set()


# -- the simulated engine --------------------------------------------------------------------------


BODIES: list[tuple[dict[str, Any], int]] = [
    ({"input": "Hello."}, 0),
    ({"input": "Hello.", "instructions": "Be brief."}, 0),
    (asked(user(said("a"), URL, said("b"), URL)), 2),
    (asked({"type": "function_call_output", "call_id": "c", "output": [URL]}), 1),
    ({"input": "Hello.", "max_output_tokens": 3, "max_tokens": 9, "n": 2}, 0),
    (asked({"type": "function_call", "name": "f", "arguments": '{"a": 1}', "call_id": "c"}), 0),
]


@pytest.mark.parametrize(("body", "media"), BODIES)
async def test_a_simulated_answer(sim: SimStack, body: dict[str, Any], media: int) -> None:
    data = [picture() for _ in range(media)]
    left = iter(data)
    sent = json.loads(json.dumps(body), object_hook=lambda o: shown(next(left)) if o == URL else o)
    sent["model"] = sim.model
    right = expected_answer(body, data)
    whole = (await sim.http.post(RESPONSES, json=sent)).json()
    assert output_text(whole) == right
    assert whole["status"] == ("incomplete" if "max_output_tokens" in body else "completed")
    streamed = await sim.http.post(RESPONSES, json=sent | {"stream": True})
    events = events_of(streamed.text)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == right
    last = events[-1]["response"]
    assert output_text(last) == right
    assert last["usage"] == whole["usage"]
    assert last["id"] == events[0]["response"]["id"] != whole["id"]


def test_a_simulated_answer_hangs_on_all_of_its_input() -> None:
    answers = {expected_answer(body, [b"x"] * media) for body, media in BODIES[:4]}
    answers.add(expected_answer(BODIES[2][0], [b"x", b"y"]))
    assert len(answers) == 5
