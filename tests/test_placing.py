"""Where requests are sent: the policy by itself, and the gateway with PD workers on real brokers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from epd_common.beginnings import MIN_TOKENS
from epd_common.ingest.body import CHAT, COMPLETIONS, RESPONSES
from epd_common.placing import FACTOR, Load, Outcome, Placing, choose, prefix_key
from epd_common.protocol import Item, Media, WorkerRecord
from epd_common.rendezvous import ranked
from service_stack import ServiceStack, bare_stack, eventually, picture

NAMES = [f"w{number}" for number in range(10)]
KEYS = [f"key {number}" for number in range(2000)]
LONG = "long " * MIN_TOKENS


def loads(*backlogs: int, slots: int = 100) -> list[Load]:
    return [Load(f"w{number}", backlog, slots) for number, backlog in enumerate(backlogs)]


def item(digest: str) -> Item:
    return Item(media=Media(ref=digest), digest=digest, key=f"key of {digest}")


def user(text: str, *references: int) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "media_ref", "item": n} for n in references]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


# -- rendezvous -----------------------------------------------------------------------------------


def test_a_worker_that_leaves_moves_its_own_keys_alone() -> None:
    gone = NAMES[3]
    rest = [name for name in NAMES if name != gone]
    for key in KEYS:
        before, after = ranked(key, NAMES), ranked(key, rest)
        assert after == [name for name in before if name != gone]


def test_a_worker_that_joins_gets_its_share_and_moves_no_other_key() -> None:
    moved = [key for key in KEYS if ranked(key, NAMES)[0] != ranked(key, [*NAMES, "new"])[0]]
    assert all(ranked(key, [*NAMES, "new"])[0] == "new" for key in moved)
    assert len(KEYS) / 22 < len(moved) < len(KEYS) / 6


def test_keys_are_spread() -> None:
    counts = Counter(ranked(key, NAMES)[0] for key in KEYS)
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 1.4 * len(KEYS) / len(NAMES)


# -- the choice -----------------------------------------------------------------------------------


def test_the_nearest_is_chosen_while_it_has_no_more_than_its_share() -> None:
    first, second = ranked("k", ["w0", "w1", "w2", "w3"])[:2]
    backlogs = {name: 4 for name in ("w0", "w1", "w2", "w3")}
    assert choose("k", loads(*backlogs.values())) == (first, "nearest")
    backlogs[first] = 9  # the mean is 5.25
    assert backlogs[first] > FACTOR * 5.25 + 1
    assert choose("k", loads(*backlogs.values())) == (second, "next")
    backlogs = {name: 20 if name in (first, second) else 0 for name in backlogs}
    assert choose("k", loads(*backlogs.values())) == ("any", "crowded")


def test_a_full_worker_is_passed_over() -> None:
    first, second = ranked("k", ["w0", "w1"])
    full = [Load(first, 4, slots=4), Load(second, 4, slots=32)]
    assert choose("k", full) == (second, "next")
    assert choose("k", loads(4, 4, slots=4)) == ("any", "crowded")


def test_who_is_alone_needs_no_place() -> None:
    assert choose("k", []) == choose("k", loads(0)) == ("any", "unplaced")


def test_who_holds_what_is_needed_comes_before_the_hash() -> None:
    nearest = ranked("k", ["w0", "w1", "w2"])
    assert choose("k", loads(0, 0, 0), holders=[nearest[2]]) == (nearest[2], "held")
    assert choose("k", loads(0, 0, 0), holders=["gone"]) == (nearest[0], "nearest")
    crowded = [Load(name, 20 if name == nearest[2] else 0, 100) for name in nearest]
    assert choose("k", crowded, holders=[nearest[2]]) == (nearest[0], "next")


# -- what a request begins with -------------------------------------------------------------------


def test_turns_of_a_conversation_begin_alike() -> None:
    items = [item("a"), item("b")]
    first = [{"role": "system", "content": "be kind"}, user("what is it?", 0)]
    second = [*first, {"role": "assistant", "content": "a cat"}, user("and this?", 1)]
    key = prefix_key(CHAT, {"messages": first}, items)
    assert key == prefix_key(CHAT, {"messages": second, "temperature": 1}, items)
    for other in (
        [user("what is it?", 0)],
        [first[0], user("what is it?", 1)],
        [first[0], user("who is it?", 0)],
        [{"role": "system", "content": "be short"}, first[1]],
    ):
        assert prefix_key(CHAT, {"messages": other}, items) != key


def test_media_count_by_their_bytes_wherever_they_stand_in_the_list() -> None:
    one = prefix_key(CHAT, {"messages": [user("x", 0)]}, [item("a")])
    assert one == prefix_key(CHAT, {"messages": [user("x", 1)]}, [item("b"), item("a")])


def test_a_response_begins_with_its_instructions_and_first_input() -> None:
    body = {"instructions": "be kind", "input": [user("hello")]}
    more = {**body, "input": [user("hello"), {"role": "assistant", "content": "hi"}, user("so?")]}
    assert prefix_key(RESPONSES, body, []) == prefix_key(RESPONSES, more, []) != ""
    assert prefix_key(RESPONSES, {"input": "hello"}, []) != ""
    other = {**body, "instructions": "be short"}
    assert prefix_key(RESPONSES, other, []) != prefix_key(RESPONSES, body, [])


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (COMPLETIONS, {"prompt": "a text"}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "no list"}),
        (CHAT, {"messages": [None, 5, {"role": "user"}]}),
        (CHAT, {}),
        (RESPONSES, {}),
        (RESPONSES, {"input": [None], "instructions": 7}),
    ],
)
def test_what_has_no_beginning(route: str, body: dict[str, Any]) -> None:
    assert prefix_key(route, body, []) == ""


# -- what is known of workers ---------------------------------------------------------------------


class Known:
    """A registry of a test."""

    def __init__(self, *workers: str, fingerprint: str = "f") -> None:
        self.records = [
            WorkerRecord(
                role="pd",
                worker=worker,
                node="n",
                state="ready",
                beat=1,
                model="m",
                fingerprint=fingerprint,
                slots=32,
                max_model_len=32768,
            )
            for worker in workers
        ]

    def answering(self, model: str) -> list[WorkerRecord]:
        assert model == "m"
        return self.records


def test_what_was_placed_since_a_heartbeat_counts() -> None:
    known, noted = Known("a", "b", "c"), list[Outcome]()
    placing = Placing(known, noted.append)
    body = {"messages": [user(LONG)]}

    nearest = ranked(prefix_key(CHAT, body, []), ["a", "b", "c"])
    with contextlib.ExitStack() as open_requests:

        def place() -> str:
            placed = placing.placed(CHAT, body, [], known.records[0])
            return open_requests.enter_context(placed)[0]

        places = [place() for _ in range(6)]
        assert places[:2] == nearest[:1] * 2
        assert Counter(places) == {nearest[0]: 4, nearest[1]: 2}
        known.records = [with_(record, beat=2) for record in known.records]
        assert place() == nearest[0], "the new beats say that there is nothing"
    for _ in range(10):
        assert placed_at(placing, body, known.records[0]) == nearest[0], "each has ended"
    assert set(noted) == {"nearest", "next"}


def placed_at(placing: Placing, body: dict[str, Any], record: WorkerRecord) -> str:
    with placing.placed(CHAT, body, [], record) as (place, _):
        return place


def with_(record: WorkerRecord, **fields: Any) -> WorkerRecord:

    return msgspec.structs.replace(record, **fields)


def test_short_prompts_and_other_models_are_not_placed() -> None:
    known, noted = Known("a", "b"), list[Outcome]()
    placing = Placing(known, noted.append)
    record = known.records[0]
    for body in ({"messages": [user("short")]}, {"messages": []}):
        assert placed_at(placing, body, record) == "any"
    other = with_(record, fingerprint="another")
    assert placed_at(placing, {"messages": [user(LONG)]}, other) == "any"
    assert set(noted) == {"unplaced"}
    assert placed_at(placing, {"messages": [user(LONG)]}, record) != "any"
    later = [user("short"), {"role": "assistant", "content": LONG}, user("short")]
    assert placed_at(placing, {"messages": later}, record) != "any", "the whole prompt counts"


# -- in the services ------------------------------------------------------------------------------


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    async with bare_stack(nats_url, redis_url, tmp_path) as running:
        await running.add_encoder()
        for _ in range(4):
            await running.add_pd()
        await running.add_gateway(placement="prefix")
        await running.ready()
        yield running


def worker_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.headers["x-epd-worker"]


async def placements(stack: ServiceStack) -> dict[str, int]:
    lines = (await stack.http.get("/metrics")).text.splitlines()
    name = "epd_gateway_placements_total"
    return {
        outcome: int(float(line.split()[-1]))
        for line in lines
        for outcome in ("nearest", "next", "crowded", "unplaced")
        if line.startswith(f'{name}{{outcome="{outcome}"}}')
    }


@pytest.mark.slow
async def test_requests_that_begin_alike_come_to_one_worker(stack: ServiceStack) -> None:
    for text in (f"{LONG} {n}" for n in range(6)):
        data = picture()
        workers = [worker_of(await stack.ask(text, data)) for _ in range(3)]
        assert len(set(workers)) == 1
    assert await placements(stack) == {"nearest": 18}
    for _ in range(2):
        await stack.ask("short")
        await stack.ask(LONG, priority=1)
    assert await placements(stack) == {"nearest": 18, "unplaced": 2}


async def test_one_popular_beginning_is_spread(stack: ServiceStack) -> None:
    for pd in stack.pds:
        pd.engine.gate.clear()
    asking = [asyncio.create_task(stack.ask(LONG)) for _ in range(16)]
    await eventually(
        lambda: sum(len(pd.engine.running) for pd in stack.pds) == 16, "all are in work"
    )
    assert max(len(pd.engine.running) for pd in stack.pds) <= 10
    assert sum(bool(pd.engine.running) for pd in stack.pds) >= 2
    for pd in stack.pds:
        pd.engine.gate.set()
    await asyncio.gather(*asking)


async def test_conversations_go_on_when_their_worker_left(stack: ServiceStack) -> None:
    first = worker_of(await stack.ask(LONG))
    (owner,) = [pd for pd in stack.pds if pd.id == first]
    await owner.process.stop()
    others = {worker_of(await stack.ask(LONG)) for _ in range(4)}
    assert first not in others


async def test_placing_can_be_turned_off(stack: ServiceStack) -> None:
    await stack.add_gateway()
    await stack.ready()
    await stack.ask(LONG)
    assert await placements(stack) == {}
