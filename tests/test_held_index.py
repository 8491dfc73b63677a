"""Placing by what PD workers say they hold: the index and the policy by themselves, and on real brokers."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Set
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd_common.beginnings import MIN_TOKENS, Beginning, beginnings_of
from epd_common.embedding_nodes import MOST_EMBEDDINGS, MOST_NODES, EmbeddingNodes
from epd_common.engines import PdEngine
from epd_common.held_index import BEAT_S, FRESH_S, MOST_WORKERS, WHOLE_S, HeldIndex
from epd_common.kept import MOST_KEPT, Kept
from epd_common.placing import holders_of, prefix_key
from epd_common.protocol import EmbeddingEvent, Held, Locator, encode, subjects
from epd_common.rendezvous import ranked
from epd_common.store import Arena
from epd_pd.holdings import Teller
from epd_pd.settings import PdSettings
from epd_sim.pd_engine import SimPdEngine
from service_stack import CHAT, ServiceStack, Worker, bare_stack, eventually, picture
from sim_stack import sim_stack

LONG = "long " * MIN_TOKENS


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def index(clock: Clock) -> HeldIndex:
    return HeldIndex(clock)


def held(seq: int, *keys: str, **fields: Any) -> Held:
    return Held(**{"worker": "w", "epoch": 1, "seq": seq, "keys": list(keys), **fields})


# -- what is known of a worker --------------------------------------------------------------------


def test_changes_follow_a_whole_message(index: HeldIndex) -> None:
    index.take(held(0, "a"))
    assert index.held_by("w") == set(), "what was there before is not known"
    index.take(held(1, "a", "b", whole=True))
    index.take(held(2, "c", gone=["a"]))
    assert index.held_by("w") == {"b", "c"} and index.sizes() == [2]
    assert index.held_by("another") == set()
    index.take(held(3, whole=True))
    assert index.held_by("w") == set()


def test_who_missed_a_message_knows_nothing_until_the_next_whole_one(index: HeldIndex) -> None:
    index.take(held(4, "a", whole=True))
    index.take(held(6, "b"))
    assert index.held_by("w") == set() and index.sizes() == []
    index.take(held(7, "c"))
    assert index.held_by("w") == set()
    index.take(held(9, "a", "b", "c", whole=True))
    index.take(held(10))
    assert index.held_by("w") == {"a", "b", "c"}


def test_a_worker_that_is_silent_holds_nothing(index: HeldIndex, clock: Clock) -> None:
    index.take(held(0, "a", whole=True))
    clock.now += FRESH_S
    assert index.held_by("w") == {"a"}
    clock.now += 0.1
    assert index.held_by("w") == set() and index.sizes() == []
    index.take(held(1, "b"))
    assert index.held_by("w") == {"a", "b"}, "it missed none"
    assert FRESH_S > 2 * BEAT_S


def test_a_process_that_was_started_anew_holds_nothing_of_before(
    index: HeldIndex, clock: Clock
) -> None:
    index.take(held(7, "a", whole=True))
    index.take(held(0, "b", epoch=2))
    assert index.held_by("w") == set()
    index.take(held(1, "b", epoch=2, whole=True))
    index.take(held(8, "a", whole=True))
    assert index.held_by("w") == {"b"}, "late words of the one before"
    clock.now += FRESH_S + 1
    index.take(held(0, "c", whole=True))
    assert index.held_by("w") == {"c"}, "its clock was set back"


def test_what_is_known_is_bounded(index: HeldIndex, clock: Clock) -> None:
    index.take(held(0, *(str(n) for n in range(MOST_KEPT + 5)), whole=True))
    assert len(index.held_by("w")) == MOST_KEPT
    index.take(held(1, "one more"))
    assert index.held_by("w") == set()
    for n in range(MOST_WORKERS):
        clock.now += 0.001
        index.take(held(0, "a", worker=f"w{n}", whole=True))
    assert len(index.sizes()) == MOST_WORKERS
    index.take(held(0, "a", whole=True))
    assert index.held_by("w") == {"a"} and index.held_by("w0") == set()


# -- what a worker says ---------------------------------------------------------------------------


def test_a_worker_says_what_changed_and_now_and_then_all() -> None:
    kept = Kept()
    teller = Teller(kept, worker="w", epoch=5)
    kept.note(["a"], [])
    assert teller.next(100.0, 0) == held(0, "a", epoch=5, whole=True)
    kept.note(["b"], ["a"])
    assert teller.next(101.0, 0) == held(1, "b", epoch=5, gone=["a"])
    assert teller.next(100.0 + WHOLE_S, 0) == held(2, "b", epoch=5, whole=True)
    assert teller.next(101.0 + WHOLE_S, 0) == held(3, epoch=5)
    assert teller.next(102.0 + WHOLE_S, 1).whole, "some may be lost with the old connection"
    teller.not_sent()
    assert teller.next(103.0 + WHOLE_S, 1).whole
    assert not teller.next(104.0 + WHOLE_S, 1).whole


def test_who_hears_all_knows_what_is_kept(index: HeldIndex) -> None:
    kept = Kept()
    teller = Teller(kept, worker="w", epoch=5)
    for n in range(50):
        kept.note([f"k{n}"], [f"k{n - 7}"] if n % 3 else [])
        index.take(teller.next(100.0 + n, 0))
        assert index.held_by("w") == kept.keys


# -- where embeddings lie -------------------------------------------------------------------------


def ready(key: str, node: str, **fields: Any) -> EmbeddingEvent:
    places = [Locator(store="arena", node=node), Locator(store="redis")]
    made = {"key": key, "epoch": 1, "state": "ready", "locators": places, **fields}
    return EmbeddingEvent(**made)


def test_embeddings_lie_where_their_events_said() -> None:
    nodes = EmbeddingNodes()
    key = "a" * 64
    nodes.take(ready(key, "n1", state="sized"))
    nodes.take(ready("short", "n1"))
    assert nodes.nodes_of(key) == nodes.nodes_of("short") == set()
    nodes.take(ready(key, "n1"))
    nodes.take(ready(key, "n2"))
    assert nodes.nodes_of(key) == {"n1", "n2"}
    for n in range(MOST_NODES):
        nodes.take(ready(key, f"m{n}"))
    assert len(nodes.nodes_of(key)) <= MOST_NODES
    for n in range(MOST_EMBEDDINGS):
        nodes.take(ready(f"{n:064x}", "n1"))
    assert nodes.nodes_of(key) == set()


# -- the policy -----------------------------------------------------------------------------------

WORKERS = {"w0": "n0", "w1": "n1", "w2": "n2"}
BEGINNINGS = [Beginning("system", 300, 0.3), Beginning("turn", 1000, 1.0)]


def holders(
    held: dict[str, Set[str]],
    lies: dict[str, Set[str]] | None = None,
    workers: dict[str, str] = WORKERS,
) -> list[str]:
    nodes = lies or {}
    return holders_of(
        "k",
        BEGINNINGS,
        list(nodes),
        workers,
        held_by=lambda worker: held.get(worker, frozenset()),
        nodes_of=nodes.__getitem__,
    )


def test_who_holds_more_of_a_request_comes_first() -> None:
    nearest = ranked("k", WORKERS)
    assert holders({}) == []
    for less, more in itertools.permutations(WORKERS, 2):
        found = holders({less: {"system"}, more: {"system", "turn"}, "another": {"turn"}})
        assert found == [more, less]
    assert holders({"w2": {"other"}}) == []
    assert holders({key: {"system"} for key in WORKERS}) == nearest, "as by the hash"


def test_then_who_has_its_embeddings_unless_all_have() -> None:
    nearest = ranked("k", WORKERS)
    assert holders({}, {"a": {"n1"}, "b": {"n1", "n2"}}) == ["w1", "w2"]
    assert holders({"w0": {"system"}}, {"a": {"n1"}}) == ["w0", "w1"]
    assert holders({"w0": {"turn"}, "w2": {"turn"}}, {"a": {"n2"}})[0] == "w2"
    assert holders({}, {"a": {"n0", "n1", "n2"}}) == []
    one = dict.fromkeys(WORKERS, "n0")
    assert holders({}, {"a": {"n0"}}, one) == [], "all are there"
    assert holders({}, {}, {}) == [] and len(nearest) == 3


# -- in the services ------------------------------------------------------------------------------


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    async with bare_stack(nats_url, redis_url, tmp_path) as running:
        await running.add_encoder()
        for _ in range(3):
            await running.add_pd()
        await running.add_gateway(placement="prefix")
        await running.ready()
        yield running


async def worker_of(asking: Any) -> str:
    response: httpx.Response = await asking
    assert response.status_code == 200, response.text
    return response.headers["x-epd-worker"]


async def metric(stack: ServiceStack, name: str) -> int:
    lines = (await stack.http.get("/metrics")).text.splitlines()
    return next((int(float(x.split()[-1])) for x in lines if x.startswith(f"{name} ")), 0)


async def placed(stack: ServiceStack, outcome: str) -> int:
    return await metric(stack, f'epd_gateway_placements_total{{outcome="{outcome}"}}')


def farthest(stack: ServiceStack, messages: list[dict[str, Any]]) -> Worker:
    """The PD worker that hashing names last."""
    key = prefix_key(CHAT, {"messages": messages}, [])
    name = ranked(key, [pd.id for pd in stack.pds])[-1]
    return next(pd for pd in stack.pds if pd.id == name)


@pytest.mark.slow
async def test_requests_go_to_who_says_it_holds_their_beginning(stack: ServiceStack) -> None:
    messages = stack.body(LONG)["messages"]
    far = farthest(stack, messages)
    (beginning,) = beginnings_of(CHAT, {"messages": messages}, [])
    nearest = await worker_of(stack.ask(LONG))
    assert nearest != far.id and await placed(stack, "nearest") == 1

    async def goes_to(worker: str) -> bool:
        return await worker_of(stack.ask(LONG)) == worker

    far.engine.kept.note([beginning.key], [])
    await eventually(lambda: goes_to(far.id), "the index is used")
    before = await placed(stack, "held")
    assert all([await goes_to(far.id) for _ in range(5)])
    assert await placed(stack, "held") == before + 5
    assert await metric(stack, "epd_gateway_held_beginnings") == 1
    assert await metric(stack, "epd_gateway_telling_workers") == 3

    far.engine.kept.note([], [beginning.key])
    await eventually(lambda: goes_to(nearest), "what is gone counts no more")

    far.engine.kept.note([beginning.key], [])
    await eventually(lambda: goes_to(far.id), "it is held again")
    await far.process.stop()
    await eventually(lambda: goes_to(nearest), "its worker is gone")


@pytest.mark.slow
async def test_a_holder_with_too_much_work_is_passed_over(stack: ServiceStack) -> None:
    messages = stack.body(LONG)["messages"]
    far = farthest(stack, messages)
    (beginning,) = beginnings_of(CHAT, {"messages": messages}, [])
    far.engine.kept.note([beginning.key], [])

    async def is_known() -> bool:
        return await worker_of(stack.ask(LONG)) == far.id

    await eventually(is_known, "the gateway knows it")
    for pd in stack.pds:
        pd.engine.gate.clear()
    asking = [asyncio.create_task(stack.ask(LONG)) for _ in range(16)]
    await eventually(
        lambda: sum(len(pd.engine.running) for pd in stack.pds) == 16, "all are in work"
    )
    assert 1 < len(far.engine.running) <= 12
    for pd in stack.pds:
        pd.engine.gate.set()
    await asyncio.gather(*asking)


async def test_words_of_another_worker_and_no_words_at_all_are_ignored(
    stack: ServiceStack, caplog: pytest.LogCaptureFixture
) -> None:
    messages = stack.body(LONG)["messages"]
    far = farthest(stack, messages)
    (beginning,) = beginnings_of(CHAT, {"messages": messages}, [])
    told = Held(worker=far.id, epoch=1 << 60, seq=0, whole=True, keys=[beginning.key])
    await stack.bus.emit(subjects.held_subject("another"), told)
    await stack.bus.emit_bytes(subjects.held_subject(far.id), b"nothing")
    await stack.bus.emit_bytes(
        subjects.held_subject(far.id), encode(Held(worker="", epoch=0, seq=0))
    )
    await eventually(lambda: caplog.text.count("what a worker holds:") == 3, "all three came")
    assert {await worker_of(stack.ask(LONG)) for _ in range(3)} != {far.id}
    assert await metric(stack, "epd_gateway_held_beginnings") == 0


async def test_workers_can_be_told_not_to_tell(stack: ServiceStack) -> None:
    for pd in stack.pds:
        await pd.process.stop()
    stack.pds.clear()
    for _ in range(2):
        await stack.add_pd(kv_events=False)
    await stack.ready()
    for pd in stack.pds:
        pd.engine.kept.note(["a"], [])

    async def nobody_tells() -> bool:
        return await metric(stack, "epd_gateway_telling_workers") == 0

    await eventually(nobody_tells, "those that told are gone", within_s=2 * FRESH_S)
    assert len({await worker_of(stack.ask(LONG)) for _ in range(4)}) == 1, "hashing is left"


async def test_a_picture_draws_new_conversations_to_its_node(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with bare_stack(nats_url, redis_url, tmp_path) as stack:
        for node in ("n0", "n1", "n2"):
            await stack.add_encoder(arena=node, node=node)
            await stack.add_pd(arena=node, node=node)
        await stack.add_gateway(placement="prefix")
        await stack.ready()
        data = picture()
        await stack.ask("short", data)
        (made,) = [e for e in stack.encoders if e.engine.encoded]
        there = next(pd.id for pd in stack.pds if pd.arena == made.arena)
        places = [await worker_of(stack.ask(f"{n} {LONG}", data)) for n in range(8)]
        assert set(places) == {there}
        others = [await worker_of(stack.ask(f"{n} {LONG}")) for n in range(8)]
        assert len(set(others)) > 1


# -- with simulated caches ------------------------------------------------------------------------


@pytest.mark.slow
async def test_conversations_go_where_their_system_prompt_is(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Requests that only share a system prompt: hashing by their first message spreads them."""
    async with sim_stack(nats_url, redis_url, tmp_path) as stack:
        stack.settings = {"sim_profile": "qwen2.5-vl-7b-h100"}
        await stack.start(pds=3, placement="prefix")
        system = {"role": "system", "content": LONG * 3}

        async def ask(text: str) -> tuple[str, int]:
            messages = [system, {"role": "user", "content": text}]
            body = {"model": stack.model, "messages": messages, "max_tokens": 4}
            response = await stack.http.post(CHAT, json=body)
            assert response.status_code == 200, response.text
            details = response.json()["usage"].get("prompt_tokens_details", {})
            return response.headers["x-epd-worker"], details.get("cached_tokens", 0)

        async def known(count: int) -> bool:
            return await metric(stack, "epd_gateway_held_beginnings") >= count

        first, cached = await ask("one")
        assert cached == 0
        await eventually(lambda: known(2), "the gateway knows the system prompt and the whole")
        for n in range(8):
            worker, cached = await ask(f"question {n}")
            assert worker == first and cached > MIN_TOKENS
        spread = {
            ranked(prefix_key(CHAT, {"messages": [system, user]}, []), [p.id for p in stack.pds])[0]
            for user in ({"role": "user", "content": f"question {n}"} for n in range(8))
        }
        assert len(spread) > 1, "by the hash they would not have come together"


@pytest.mark.slow
async def test_what_a_simulated_cache_drops_is_told(
    nats_url: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sim_stack(nats_url, redis_url, tmp_path) as stack:

        def small(settings: PdSettings, arena: Arena) -> PdEngine:
            options = settings.sim_options()
            profile = dataclasses.replace(options.profile, kv_tokens=2000)
            options = dataclasses.replace(options, profile=profile)
            return SimPdEngine(options, arena=arena, max_num_seqs=4, sleep=stack.pd_time)

        monkeypatch.setattr(stack, "pd_engine", small)
        await stack.start(placement="prefix")

        async def holds(count: int) -> bool:
            return await metric(stack, "epd_gateway_held_beginnings") == count

        for number in range(2):
            for turns in (1, 2):
                messages = [{"role": "user", "content": f"{number} {LONG}"}] * turns
                body = {"model": stack.model, "messages": messages, "max_tokens": 4}
                assert (await stack.http.post(CHAT, json=body)).status_code == 200
                await eventually(partial(holds, 2 * number + turns), "all that was asked is held")
        body = {"model": stack.model, "prompt": "other " * 1100, "max_tokens": 4}
        assert (await stack.http.post("/v1/completions", json=body)).status_code == 200
        await eventually(lambda: holds(1), "what is left")
