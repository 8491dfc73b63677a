"""What is told of a request whose prompt one worker prefilled and another one answered."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from epd_cli.audit import audit
from epd_cli.brokers import Brokers, embedded_brokers
from epd_cli.explain import explain, receipt, stages
from epd_cli.status import status
from epd_cli.top.look import Look, Seen
from epd_cli.top.rates import rates
from epd_cli.top.requests import row
from epd_common.protocol import Item, ItemReceipt, Media, Receipt, WorkerRecord
from epd_common.requester import SentRequest
from epd_gateway.trails import Trail
from epd_pd.handing_over import HandingOver
from roles_stack import roles_stack
from service_stack import CHAT, ServiceStack, eventually, picture
from sim_stack import SimStack, sim_stack
from test_traces import PARENT, Collector, collector, value_of
from test_worker_metrics import free_port

__all__ = ["collector"]


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[SimStack]:
    async with roles_stack(nats_url, redis_url, tmp_path) as running:
        yield running


async def ended_trail(stack: ServiceStack, answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    path = f"/ui/api/requests/{answer.headers['x-request-id']}"

    async def over() -> bool:
        return bool((await stack.http.get(path)).json()["state"] != "open")

    await eventually(over, "the request has ended")
    return dict((await stack.http.get(path)).json())


async def streamed(stack: SimStack, text: str, *pictures: bytes, **fields: Any) -> httpx.Response:
    async with stack.streaming(text, *pictures, **fields) as response:
        await response.aread()
    return response


def lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, what prefill workers hand over is kept for no time at all."""
    publish = HandingOver.publish

    async def too_late(self: HandingOver, *args: Any, **fields: Any) -> None:
        monkeypatch.setattr(self, "_lease_s", 0.0)
        await publish(self, *args, **fields)

    monkeypatch.setattr(HandingOver, "publish", too_late)


# -- trails ------------------------------------------------------------------------------------------


async def test_a_trail_tells_of_both_workers_in_order(stack: SimStack) -> None:
    prefill, decode = stack.pds
    known, new = picture((16, 16)), picture((24, 24))
    await stack.ask("first", known)
    answer = await streamed(stack, "x", known, new, max_tokens=20, ignore_eos=True)
    trail = await ended_trail(stack, answer)
    first, second = trail["prefill"], trail["pd"]
    assert (first["worker"], second["worker"]) == (prefill.id, decode.id)
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert second["loaded_tokens"] > first["loaded_tokens"] == 0
    order = [0, trail["ingested_s"], trail["published_s"]]
    for worker in (first, second):
        order += [worker[f"{at}_s"] for at in ("pulled", "prepared", "entered", "first", "ended")]
    assert order == sorted(order)
    # Two clocks were joined: the gateway's own says when the answer came and ended.
    assert second["first_s"] <= trail["first_s"] <= second["first_s"] + 0.5
    assert second["ended_s"] <= trail["ended_s"] <= second["ended_s"] + 0.5

    reused, encoded = trail["items"]
    assert (reused["origin"], encoded["origin"]) == ("reused", "encoded")
    for item in (reused, encoded):
        assert item["ready_s"] <= item["pinned_s"] <= first["first_s"]
        assert item["encoder"] == stack.encoders[0].id and item["bytes"] > 0


@pytest.mark.slow
async def test_a_header_explains_both_workers(stack: SimStack) -> None:
    body = stack.body("x", picture())
    answer = await stack.http.post(CHAT, json=body, headers={"x-epd-explain": "true"})
    told = json.loads(answer.headers["x-epd-receipt"])
    assert told["prefill"]["worker"] == stack.pds[0].id
    assert told["pd"]["worker"] == answer.headers["x-epd-worker"] == stack.pds[1].id


@pytest.mark.slow
async def test_a_prompt_that_was_lost_shows_that_it_was_prefilled_again(
    stack: SimStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(monkeypatch)
    answer = await streamed(stack, "x", picture())
    trail = await ended_trail(stack, answer)
    assert trail["pd"]["worker"] == stack.pds[1].id and trail["pd"]["loaded_tokens"] == 0
    (item,) = trail["items"]
    assert item["pinned_s"] > trail["prefill"]["ended_s"], "the decode worker's own"
    names = [name for name, _, _ in stages(trail)]
    assert "load" not in names and "prefill (decode)" in names


def trail_of(**decode: Any) -> dict[str, Any]:
    """Of a request with two items, "a" and "b", that arrived at 0 and was published at 0.2 s."""
    known = Receipt(**{"worker": "d", "node": "n", "attempt": 2, "queued_s": 0.5} | decode)
    items = [Item(key=key, media=Media(ref="r")) for key in "ab"]
    one = Trail(request_id="x", route=CHAT, tenant="", model="m", stream=True, started=0.0)
    reply: Any = SimpleNamespace(receipt=known)
    one.sent(SentRequest(reply, items, ["encoded"] * 2, 0.1, 0.2, "any"))
    one.end(200, "answered")
    return one.shown()


def prefilled(**fields: Any) -> Receipt:
    told = {"worker": "p", "node": "n", "attempt": 1, "queued_s": 1.0, "first_s": 2.0}
    items = [ItemReceipt(key=key, ready_s=1.0, pinned_s=1.5, store="arena") for key in "ab"]
    return Receipt(**told | {"ended_s": 3.0, "items": items, "prompt_tokens": 9} | fields)


def test_each_worker_has_a_clock_of_its_own() -> None:
    shown = trail_of(prefill=prefilled(), first_s=0.25, ended_s=0.75, loaded_tokens=9)
    first, second = shown["prefill"], shown["pd"]
    assert (first["pulled_s"], first["first_s"], first["ended_s"]) == (1.2, 3.2, 4.2)
    assert (second["pulled_s"], second["first_s"], second["ended_s"]) == (4.7, 4.95, 5.45)
    assert (first["loaded_tokens"], second["loaded_tokens"]) == (0, 9)
    assert [item["pinned_s"] for item in shown["items"]] == [2.7, 2.7]


def test_a_decode_worker_s_own_items_count() -> None:
    own = [ItemReceipt(key="b", ready_s=0.1, pinned_s=0.2, store="redis")]
    shown = trail_of(prefill=prefilled(), items=own)
    assert [item["pinned_s"] for item in shown["items"]] == [2.7, 4.9]
    assert [item["store"] for item in shown["items"]] == ["arena", "redis"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prefill": prefilled()},
        {"items": []},
        {"items": [*prefilled().items, ItemReceipt(key="c")]},
        {"first_s": None},
        {"first_s": -1.0},
        {"first_s": 4.0},
        {"ended_s": 1e300},
        {"ended_s": math.inf},
        {"queued_s": math.nan},
        {"worker": "p" * 100_000},
        {"prompt_tokens": 2**60},
        {"loaded_tokens": -(2**60)},
        {"items": [ItemReceipt(key=key, encode_s=math.nan) for key in "ab"]},
        {"items": [ItemReceipt(key=key, bytes=2**60) for key in "ab"]},
    ],
)
def test_a_prefill_that_cannot_be_is_not_told_nor_what_is_placed_by_it(
    fields: dict[str, Any],
) -> None:
    shown = trail_of(prefill=prefilled(**fields))
    assert shown["prefill"] is None and shown["pd"] is None
    assert len(json.dumps(shown, allow_nan=False)) < 2000


# -- commands ----------------------------------------------------------------------------------------


def test_stages_of_a_prompt_that_was_handed_over() -> None:
    shown = trail_of(
        prefill=prefilled(prepared_s=0.5, entered_s=1.0),
        prepared_s=0.05,
        entered_s=0.05,
        first_s=0.25,
        ended_s=0.75,
        loaded_tokens=9,
    )
    of_workers = [(name, round(a, 3), round(b, 3)) for name, a, b in stages(shown)][3:]
    assert of_workers == [
        ("queued for prefill", 0.2, 1.2),
        ("prepare", 1.2, 1.7),
        ("wait for items", 1.7, 2.2),
        ("prefill", 2.2, 3.2),
        ("hand-over", 3.2, 4.7),
        ("prepare (decode)", 4.7, 4.75),
        ("load", 4.75, 4.95),
        ("decode", 4.95, 5.45),
    ]
    lines = "\n".join(receipt(shown))
    assert "prefill worker p on node n, attempt 1; placed: any; about 9 prompt tokens" in lines
    assert "decode worker d on node n, attempt 2; loaded 9 tokens" in lines
    assert "PD worker" not in lines


@pytest.mark.slow
async def test_epd_explain_and_status_name_both_workers(
    stack: SimStack, nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = await stack.ask("x", picture())
    await ended_trail(stack, answer)
    assert await explain(nats_url, answer.headers["x-request-id"], as_json=False) == 0
    shown = capsys.readouterr().out
    prefill, decode = stack.pds
    for part in (prefill.id, decode.id, "queued for prefill", "hand-over", "load and decode"):
        assert part in shown
    assert max(map(len, shown.splitlines()[2:])) < 80 and "…" not in shown
    await status(nats_url, as_json=False)
    words = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    roles = {line[0]: line[1] for line in words if len(line) > 1}
    assert (roles[prefill.id], roles[decode.id]) == ("prefill", "decode")
    assert roles[stack.encoders[0].id] == "encoder"


def test_epd_top_names_both_workers_and_counts_what_is_handed_over() -> None:
    told = row({"prefill": {"worker": "p-1"}, "pd": {"worker": "d-1"}})
    assert told.pd == "p-1 > d-1"
    assert row({"prefill": None, "pd": {"worker": "pd-1"}}).pd == "pd-1"

    def look(at: float, handed_over: int) -> Look:
        record = WorkerRecord(
            role="pd", worker="p", node="n", state="ready", beat=1, pd_role="prefill"
        )
        return Look(at, [Seen(record, True, {"handed_over": handed_over})])

    assert rates(look(1.0, 10), look(3.0, 16)).workers == {"pd.p": 3.0}


@pytest.mark.slow
async def test_the_live_view_says_what_a_worker_does(stack: SimStack) -> None:
    live = (await stack.http.get("/ui/api/live")).json()
    roles = {worker["worker"]: worker["pd_role"] for worker in live["workers"]}
    assert [roles[pd.id] for pd in stack.pds] == ["prefill", "decode"]
    assert roles[stack.encoders[0].id] == roles[stack.gateway_id] == ""


# -- traces and metrics ------------------------------------------------------------------------------


@pytest.mark.slow
async def test_one_trace_has_the_prefill_and_the_decode(
    collector: Collector, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with roles_stack(
        nats_url,
        redis_url,
        tmp_path,
        gateway={"otlp_endpoint": collector.url},
        otlp_endpoint=collector.url,
    ) as stack:
        body = stack.body("x", picture(), stream=True, max_tokens=20, ignore_eos=True)
        answer = await stack.http.post(CHAT, json=body, headers={"traceparent": PARENT})
        assert answer.status_code == 200
    (root,) = collector.named("epd-gateway", f"POST {CHAT}")
    by_outcome = {
        value_of(span, "epd.outcome"): span for span in collector.named("epd-pd", "generate")
    }
    names = {}
    for outcome, span in by_outcome.items():
        assert (span.trace_id, span.parent_span_id) == (root.trace_id, root.span_id)
        mine = [child for _, child in collector.spans if child.parent_span_id == span.span_id]
        names[outcome] = sorted(child.name for child in mine)
        assert all(child.start_time_unix_nano <= child.end_time_unix_nano for child in mine)
    assert names["answered"] == ["decode", "load", "prepare", "queued"]
    for name in ("admission", "hand over", "image pinned", "prefill", "prepare", "queued"):
        assert name in names["handed_over"]
    assert "decode" not in names["handed_over"]
    assert value_of(by_outcome["answered"], "epd.loaded_tokens") > 0
    ended = by_outcome["handed_over"].end_time_unix_nano
    assert by_outcome["answered"].start_time_unix_nano <= ended + 1e8, "from its publishing"


class Scraped:
    """The metrics of one worker now."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def __call__(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


async def scrape(port: int) -> Scraped:
    async with httpx.AsyncClient() as client:
        return Scraped((await client.get(f"http://127.0.0.1:{port}/metrics")).text)


@pytest.mark.slow
async def test_metrics_of_both_workers(
    nats_url: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [free_port(), free_port()]
    async with sim_stack(nats_url, redis_url, tmp_path) as stack:
        stack.settings["split_tokens"] = 0
        for role, port in zip(("prefill", "decode"), ports, strict=True):
            await stack.add_pd(pd_role=role, metrics_port=port)
        await stack.start(pds=0)
        await eventually(lambda: bool(stack.registry.decoding(stack.model)), "somebody decodes")
        for number in range(2):
            await streamed(stack, f"number {number}", picture())
        lose(monkeypatch)
        last = await ended_trail(stack, await streamed(stack, "lost"))

        async def counted() -> bool:
            return (await scrape(ports[1]))("epd_pd_handover_seconds_count") == 3

        await eventually(counted, "all have ended")
        prefill, decode = [await scrape(port) for port in ports]
    assert prefill("epd_pd_info", role="prefill") == decode("epd_pd_info", role="decode") == 1
    assert prefill("epd_pd_handed_over_requests_total") == 3
    assert prefill("epd_pd_jobs_total", outcome="handed_over") == prefill("epd_pd_jobs_total") == 3
    assert prefill("epd_pd_kv_requests_total") == prefill("epd_pd_handover_seconds_count") == 0
    assert decode("epd_pd_handed_over_requests_total") == 0
    assert decode("epd_pd_kv_requests_total", how="loaded") == 2
    assert decode("epd_pd_kv_requests_total", how="lost") == 1
    assert decode("epd_pd_loaded_tokens_total") > 0
    took = decode("epd_pd_handover_seconds_sum")
    of_last = last["pd"]["first_s"] - last["prefill"]["ended_s"]
    assert of_last < took < 3 * of_last + 5


# -- audit -------------------------------------------------------------------------------------------


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[Brokers]:
    async with embedded_brokers(tmp_path / "brokers") as running:
        yield running


async def leave(stack: SimStack, worker: int) -> None:
    """Ask, and go away while that worker has the request."""
    stack.pd_time.passing.clear()
    asking = asyncio.create_task(stack.ask("never read"))

    async def has_it() -> bool:
        return await stack.busy(stack.pds[worker]) == 1

    async def nobody_has_it() -> bool:
        return not any([await stack.busy(pd) for pd in stack.pds])

    await eventually(has_it, "the request runs")
    asking.cancel()
    await eventually(nobody_has_it, "the request is cancelled")
    stack.pd_time.passing.set()


@pytest.mark.slow
async def test_what_was_handed_over_is_accounted_for(
    own: Brokers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with roles_stack(own.nats_url, own.redis_url, tmp_path) as stack:
        one = picture()
        for number in range(3):
            await streamed(stack, f"number {number}", one, max_tokens=4)
        await leave(stack, 0)
        await leave_while_it_is_told(stack)
        code = await audit(own.nats_url, own.redis_url, as_json=True, idle=True, within_s=10)
        found = json.loads(capsys.readouterr().out)
    assert found["differences"] == [] and found["notes"] == [] and code == 0
    totals = found["totals"]
    assert totals["gateway"] == {"received": 5, "running": 0, "answered": 3, "cancelled": 2}
    assert totals["generate queue"] == {"received": 9, "running": 0, "taken": 9}
    assert totals["pd"] == {
        "received": 9,
        "running": 0,
        "handed_over": 4,
        "answered": 3,
        "cancelled": 2,
    }


async def leave_while_it_is_told(stack: SimStack) -> None:
    """Ask, and go away while the decode worker tells the answer."""
    stack.pd_time.real_s = 0.01
    async with stack.streaming("told", max_tokens=2000, ignore_eos=True) as response:
        async for _ in response.aiter_lines():
            break
    stack.pd_time.real_s = 0.0

    async def idle() -> bool:
        return not any([await stack.busy(pd) for pd in stack.pds])

    await eventually(idle, "the request is cancelled")
