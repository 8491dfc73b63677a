"""Trails: what is told of a request afterwards, by the gateway, its page's data, and ``epd explain``."""

from __future__ import annotations

import json
import math
import re
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.msg import Msg

from epd_cli.explain import WIDTH, bar, explain, stages
from epd_common.api_keys import ApiKey, hash_key
from epd_common.errors import BadRequestError, UpstreamError
from epd_common.protocol import Item, ItemReceipt, Media, Receipt, ReplyHead, subjects
from epd_common.requester import SentRequest
from epd_gateway import relay
from epd_gateway.trails import KEPT, LONGEST, SHORT_ITEMS, Trail, Trails
from service_stack import CHAT, ServiceStack, bare_stack, eventually, picture
from sim_stack import SimStack, sim_stack


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[SimStack]:
    async with sim_stack(nats_url, redis_url, tmp_path) as running:
        await running.start()
        yield running


async def trail_of(stack: ServiceStack, request_id: str) -> dict[str, Any]:
    answer = await stack.http.get(f"/ui/api/requests/{request_id}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def ended_trail(stack: ServiceStack, request_id: str) -> dict[str, Any]:
    """Once the gateway knows that its last byte is sent, which a client may know before."""

    async def over() -> bool:
        return (await trail_of(stack, request_id))["state"] != "open"

    await eventually(over, "the request has ended")
    return await trail_of(stack, request_id)


async def test_a_request_tells_its_stages_in_order(stack: SimStack) -> None:
    known, new = picture((16, 16)), picture((24, 24))
    await stack.ask("first", known)
    answer = await stack.ask("x", known, new)
    trail = await ended_trail(stack, answer.headers["x-request-id"])
    assert (trail["state"], trail["status"], trail["stream"]) == ("answered", 200, False)
    assert (trail["gateway"], trail["error"]) == (stack.gateway_id, None)
    pd = trail["pd"]
    assert (pd["worker"], pd["attempt"]) == (stack.pds[0].id, 1)
    assert pd["prompt_tokens"] > 0 and pd["restarts"] == pd["resumed_tokens"] == 0
    order = [0, trail["ingested_s"], trail["published_s"], pd["pulled_s"], pd["prepared_s"]]
    order += [pd["entered_s"], pd["first_s"], trail["first_s"], trail["ended_s"]]
    assert order == sorted(order)

    reused, encoded = trail["items"]
    assert (reused["origin"], encoded["origin"]) == ("reused", "encoded")
    assert (reused["width"], encoded["width"]) == (16, 24)
    assert [reused["key"], encoded["key"]] == [stack.key(known), stack.key(new)]
    assert reused["encode_s"] is None and encoded["encode_s"] > 0
    for item in (reused, encoded):
        assert item["ready_s"] <= item["pinned_s"] <= pd["first_s"]
        assert (item["encoder"], item["store"]) == (stack.encoders[0].id, "arena")
        assert item["bytes"] > 0 and item["rescue"] == ""
    took = sum(encoded[f"{stage}_s"] for stage in ("queued", "media", "encode", "publish"))
    assert trail["published_s"] - 0.05 < encoded["ready_s"] - took


async def test_a_stream_is_open_until_its_end(stack: SimStack) -> None:
    stack.pd_time.hold_after = 3
    async with stack.streaming("x", picture(), max_tokens=20, ignore_eos=True) as response:
        request_id = response.headers["x-request-id"]
        trail = await trail_of(stack, request_id)
        assert (trail["state"], trail["pd"], trail["ended_s"]) == ("open", None, None)
        assert [item["origin"] for item in trail["items"]] == ["encoded"]
        stack.pd_time.passing.set()
        await response.aread()
    trail = await ended_trail(stack, request_id)
    assert trail["state"] == "answered" and trail["stream"] and trail["first_s"] < trail["ended_s"]
    assert trail["pd"]["first_s"] <= trail["pd"]["ended_s"]


async def ended_by_outcome(stack: SimStack) -> Counter[str]:
    text = (await stack.http.get("/metrics")).text
    found = re.findall(r'^epd_gateway_ended_total{outcome="(\w+)"} (\d+)', text, re.MULTILINE)
    return Counter({outcome: int(number) for outcome, number in found})


async def test_a_stream_that_its_client_leaves_is_cancelled(stack: SimStack) -> None:
    before = await ended_by_outcome(stack)
    stack.pd_time.hold_after = 3
    async with stack.streaming("x", max_tokens=20, ignore_eos=True) as response:
        request_id = response.headers["x-request-id"]
    trail = await ended_trail(stack, request_id)
    assert (trail["state"], trail["status"], trail["error"]) == ("cancelled", 200, None)
    # And so do the accounts.
    assert await ended_by_outcome(stack) - before == Counter(cancelled=1)
    stack.pd_time.passing.set()


async def test_the_latest_come_first_and_an_error_says_its_stage(stack: SimStack) -> None:
    good = await stack.ask("x")
    bad = await stack.http.post(CHAT, json={**stack.body("y"), "model": "none"})
    assert bad.status_code == 404
    for ended in (good, bad):
        await ended_trail(stack, ended.headers["x-request-id"])
    live = (await stack.http.get("/ui/api/live")).json()
    first, second = live["requests"]
    assert [first["request_id"], second["request_id"]] == [
        answer.headers["x-request-id"] for answer in (bad, good)
    ]
    assert (first["state"], first["error"]["code"]) == ("refused", "model_not_found")
    assert (first["pd"], first["published_s"], first["items"]) == (None, None, [])
    assert {worker["role"] for worker in live["workers"]} == {"gateway", "encoder", "pd"}
    assert [queue["stage"] for queue in live["queues"]] == ["encode", "generate"]
    assert live["stores"][0]["quota_bytes"] > 0
    unknown = await stack.http.get("/ui/api/requests/0")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")


@pytest.mark.slow
async def test_a_lost_embedding_shows_that_it_was_ordered_again(stack: SimStack) -> None:
    data = picture()
    await stack.ask("first", data)
    await stack.forget(data)
    answer = await stack.ask("again", data)
    (item,) = (await ended_trail(stack, answer.headers["x-request-id"]))["items"]
    assert (item["origin"], item["rescue"]) == ("reused", "ordered")


async def test_an_answer_explains_itself_where_it_is_asked_to(stack: SimStack) -> None:
    pictures = [picture((8 + n, 8)) for n in range(SHORT_ITEMS + 2)]
    body = stack.body("x", *pictures)
    silent = await stack.http.post(CHAT, json=body)
    assert "x-epd-receipt" not in silent.headers
    answer = await stack.http.post(CHAT, json=body, headers={"x-epd-explain": "true"})
    told = json.loads(answer.headers["x-epd-receipt"])
    assert told["request_id"] == answer.headers["x-request-id"]
    assert told["pd"]["worker"] == answer.headers["x-epd-worker"]
    assert len(told["items"]) == SHORT_ITEMS


@pytest.mark.slow
async def test_epd_explain_shows_the_stages(
    stack: SimStack, nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = await stack.ask("x", picture())
    request_id = answer.headers["x-request-id"]
    await ended_trail(stack, request_id)
    assert await explain(nats_url, request_id, as_json=False) == 0
    shown = capsys.readouterr().out
    for part in (request_id, "answered (200)", "image 1 encode", "prefill and decode", "━"):
        assert part in shown
    assert max(map(len, shown.splitlines()[2:])) < 80 and "…" not in shown
    assert stack.pds[0].id in shown and stack.encoders[0].id in shown
    assert await explain(nats_url, request_id, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["request_id"] == request_id and told["tenant"] == ""
    with pytest.raises(BadRequestError, match="cannot be a request's id"):
        await explain(nats_url, "a.b", as_json=False)


async def test_gateways_answer_no_question_to_a_subject_of_the_system(
    stack: SimStack,
) -> None:
    """Whoever asks could have them publish what he may not."""
    request_id = (await stack.ask("x")).headers["x-request-id"]
    heard: list[str] = []

    async def note(message: Msg) -> None:
        heard.append(message.subject)

    own, foreign = stack.bus.client.new_inbox(), subjects.cancel_subject("x")
    async with stack.bus.listening(own, note), stack.bus.listening(foreign, note):
        for reply in (foreign, own):
            await stack.bus.emit_bytes(subjects.explain_subject(request_id), b"", reply)
        await eventually(lambda: own in heard, "the question is answered")
    assert heard == [own]


async def test_a_fault_of_the_gateway_is_not_called_a_cancel(
    stack: SimStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(sent: SentRequest, head: ReplyHead) -> dict[str, str]:
        raise RuntimeError("a fault")

    monkeypatch.setattr(relay, "_headers", broken)
    answer = await stack.ask("x")
    assert answer.status_code == 500
    trail = await ended_trail(stack, answer.headers["x-request-id"])
    assert (trail["state"], trail["status"]) == ("failed", 500)


@pytest.mark.slow
async def test_epd_explain_says_that_nobody_knows_it(
    stack: SimStack, nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await explain(nats_url, "unknown", as_json=False) == 1
    assert "no gateway remembers the request unknown" in capsys.readouterr().err


@pytest.mark.slow
async def test_tenants_see_their_own_requests_and_no_workers(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    keys = tuple(ApiKey(hash=hash_key(name.encode()), tenant=name) for name in ("a", "b"))
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        await stack.add_encoder()
        await stack.add_pd()
        await stack.add_gateway(api_keys=keys)
        stack.http.headers["authorization"] = "Bearer a"
        await stack.ready()
        request_id = (await stack.ask("x")).headers["x-request-id"]
        assert (await ended_trail(stack, request_id))["state"] == "answered"
        live = (await stack.http.get("/ui/api/live")).json()
        assert [request["request_id"] for request in live["requests"]] == [request_id]
        assert not {"workers", "queues", "stores"} & live.keys()
        stack.http.headers["authorization"] = "Bearer b"
        assert (await stack.http.get("/ui/api/live")).json()["requests"] == []
        assert (await stack.http.get(f"/ui/api/requests/{request_id}")).status_code == 404
        del stack.http.headers["authorization"]
        assert (await stack.http.get("/ui/api/live")).status_code == 401


# -- by themselves -----------------------------------------------------------------------------------


def trail(request_id: str, tenant: str = "") -> Trail:
    return Trail(
        request_id=request_id, route=CHAT, tenant=tenant, model="m", stream=False, started=0.0
    )


def test_only_the_latest_are_kept() -> None:
    trails = Trails()
    for number in range(KEPT + 2):
        trails.begin(trail(str(number)))
    assert trails.find("1") is None and trails.find("2") is not None
    newest = trails.latest(2, tenant="")
    assert [shown["request_id"] for shown in newest] == [str(KEPT + 1), str(KEPT)]


def test_a_tenant_finds_its_own() -> None:
    trails = Trails()
    trails.begin(trail("x", "a"))
    assert trails.find("x", tenant="b") is None
    assert trails.find("x", tenant="a") is trails.find("x") is not None
    assert trails.latest(9, tenant="b") == []


def sent(reply: Any = None, **receipt: Any) -> SentRequest:
    """A request with one item, and what a PD worker has said of it."""
    worker = {"worker": "p", "node": "n", "attempt": 1, "queued_s": 0.0}
    known = Receipt(**worker | receipt) if receipt else None
    item = Item(key="k", media=Media(ref="r"))
    reply = reply or SimpleNamespace(receipt=known)
    return SentRequest(reply, [item], ["encoded"], 0.1, 0.2, "any")


def ended(**receipt: Any) -> Trail:
    one = trail("x")
    one.sent(sent(**receipt))
    one.end(200, "answered")
    return one


@pytest.mark.parametrize(
    "receipt",
    [
        {"queued_s": math.nan},
        {"ended_s": math.inf},
        {"queued_s": 1.7e308, "ended_s": 1.7e308},
        {"worker": "p" * 100_000},
        {"node": "n" * 100_000},
        {"items": [ItemReceipt(key="k", encode_s=math.nan)]},
        {"items": [ItemReceipt(key="k", pinned_s=-math.inf)]},
        {"items": [ItemReceipt(key="k", encoder="e" * 100_000)]},
        {"items": [ItemReceipt(key="k", store="s" * 100_000)]},
        {"items": [ItemReceipt(key=str(n)) for n in range(1000)]},
    ],
)
def test_a_receipt_that_cannot_be_is_not_told(receipt: dict[str, Any]) -> None:
    one = ended(**receipt)
    shown = one.shown()
    assert len(json.dumps(shown, allow_nan=False)) < 2000
    assert shown["pd"] is None and shown["items"][0]["origin"] == "encoded"


def test_a_header_is_plain_whatever_names_there_are() -> None:
    told = ended(worker="pd-\u4f60\u597d", node="k\u00f6ln").short()
    assert told.isascii() and json.loads(told)["pd"]["node"] == "k\u00f6ln"


def test_a_trail_that_has_ended_keeps_no_reply() -> None:
    """It has each token of the answer."""

    class Reply:
        receipt = None

    reply = Reply()
    gone = weakref.ref(reply)
    one = trail("x")
    one.sent(sent(reply))
    one.end(200, "answered")
    one.end(200, "answered")
    del reply
    assert gone() is None
    assert one.shown()["placement"] == "any" and one.shown()["items"][0]["key"] == "k"


def test_a_trail_keeps_nothing_of_where_its_error_came_from() -> None:
    """Those places have the request's body, with all its pictures."""

    class Body:
        pass

    def fail(body: Body) -> None:
        raise UpstreamError("m" * 100_000, code="c", stage="generate")

    body = Body()
    gone = weakref.ref(body)
    one = trail("x")
    try:
        fail(body)
    except UpstreamError as error:
        one.failed(error)
    del body
    assert gone() is None
    told = one.shown()["error"]
    assert (told["status"], told["code"], told["stage"]) == (502, "c", "generate")
    assert len(told["message"]) == LONGEST


def test_bars_stand_within_their_axis() -> None:
    half = WIDTH // 2
    assert bar(0.0, 0.5, 1.0) == "━" * half
    assert bar(0.5, 1.0, 1.0) == " " * half + "━" * half
    assert bar(1.0, 1.0, 1.0) == " " * (WIDTH - 1) + "━", "what took no time is seen"


def test_stages_of_an_encode_for_an_earlier_request_begin_with_this_one() -> None:
    item = {"modality": "image", "ready_s": 0.5, "pinned_s": 0.6}
    item |= {"queued_s": 0.2, "media_s": 0.1, "encode_s": 0.6, "publish_s": 0.1}
    shown = {"ingested_s": 0.1, "items": [item], "pd": None}
    assert stages(shown) == [
        ("ingest", 0.0, 0.1),
        ("image 1 encode", 0.0, pytest.approx(0.4)),
        ("image 1 publish", pytest.approx(0.4), pytest.approx(0.5)),
        ("image 1 to PD", 0.5, 0.6),
    ]
