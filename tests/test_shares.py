"""Who is let in: the policy, what requests cost, and the ledger that gateways share, on a real Valkey."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from epd_common.costs import Prices, Work, rows_by_size, work_of, work_unseen
from epd_common.deadlines import bounded
from epd_common.errors import (
    ERROR_TYPES,
    BadRequestError,
    BusyError,
    UnavailableError,
    from_status,
)
from epd_common.ingest.body import CHAT, COMPLETIONS
from epd_common.ingest.fitting import check_fits
from epd_common.protocol import Item, Media
from epd_common.protocol.lanes import encode_lane, generate_lane
from epd_common.shares import Limits, Sums, Verdict, judge, retry_after_s, yields
from epd_common.store import Ledger, SizeTable, open_redis
from epd_common.store.ledger import LEASE_S, Holding
from service_stack import eventually

LIMITS = Limits(capacity=1000, line=750, least=50, fair=True, slots=8)
IN, OVER, FULL = Verdict.IN, Verdict.OVER_SHARE, Verdict.FULL


# -- policy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sums", "weight", "cost", "verdict"),
    [
        (Sums(0, 0, 0.0), 1.0, 1000, IN),  # empty: whatever its size
        (Sums(0, 0, 0.0), 1.0, 1001, FULL),
        (Sums(700, 700, 0.0), 1.0, 50, IN),  # up to the line, work-conserving
        (Sums(700, 700, 0.0), 1.0, 51, OVER),  # what is above is for others
        (Sums(750, 0, 1.0), 1.0, 250, IN),  # a newcomer, whatever the others hold
        (Sums(750, 0, 1.0), 1.0, 251, FULL),
        (Sums(750, 300, 1.0), 1.0, 75, IN),  # half of the line
        (Sums(750, 300, 1.0), 1.0, 76, OVER),
        (Sums(750, 300, 1.0), 3.0, 250, IN),  # three quarters of it
        (Sums(800, 40, 99.0), 1.0, 10, IN),  # the least, however many there are
        (Sums(800, 40, 99.0), 1.0, 11, OVER),
        (Sums(995, 1, 99.0), 1.0, 6, FULL),
        (Sums(900, 500, 1.0), 1.0, 101, OVER),  # both: its own is what it can do something about
    ],
)
def test_who_is_let_in(sums: Sums, weight: float, cost: int, verdict: Verdict) -> None:
    assert judge(LIMITS, sums, weight, cost) is verdict


def test_without_tenants_the_capacity_alone_counts() -> None:
    limits = Limits(capacity=1000, line=750, least=0, fair=False, slots=8)
    assert judge(limits, Sums(900, 900, 0.0), 1.0, 100) is IN
    assert judge(limits, Sums(900, 900, 0.0), 1.0, 101) is FULL


@pytest.mark.parametrize(
    ("sums", "weight", "behind"),
    [  # of 8 slots 6 are for whoever comes
        (Sums(1, 1, 0.0, 5, 5), 1.0, False),
        (Sums(1, 1, 0.0, 6, 6), 1.0, True),
        (Sums(1, 0, 1.0, 60, 0), 1.0, False),  # a newcomer
        (Sums(1, 1, 1.0, 6, 2), 1.0, False),  # half of them
        (Sums(1, 1, 1.0, 6, 3), 1.0, True),
        (Sums(1, 1, 1.0, 8, 5), 5.0, True),  # five of six
        (Sums(1, 1, 1.0, 8, 4), 5.0, False),
        (Sums(1, 0, 99.0, 99, 0), 1.0, False),  # one in any case
        (Sums(1, 1, 99.0, 99, 1), 1.0, True),
    ],
)
def test_who_has_more_than_its_share_of_the_slots_goes_behind_others(
    sums: Sums, weight: float, behind: bool
) -> None:
    assert yields(LIMITS, sums, weight) is behind
    alone = dataclasses.replace(LIMITS, fair=False)
    assert not yields(alone, sums, weight)


def test_who_is_refused_may_come_again_when_enough_has_ended() -> None:
    def after(sums: Sums, verdict: Verdict, cost: int, mean_s: float = 10.0) -> float:
        return retry_after_s(LIMITS, sums, verdict, cost, mean_s)

    assert after(Sums(800, 400, 1.0), OVER, 100) == pytest.approx(10.0 * 150 / 400)
    assert after(Sums(1000, 400, 1.0), FULL, 100) == pytest.approx(10.0 * 100 / 1000)
    assert after(Sums(1000, 400, 1.0), FULL, 1, 0.001) == 1.0
    assert after(Sums(900, 1, 1.0), OVER, 1000) == 30.0


# -- costs ------------------------------------------------------------------------------------------


def chat(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}], **fields}


def picture_of(width: int, height: int) -> Item:
    return Item(media=Media(ref="r"), width=width, height=height)


URL = {"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}


@pytest.mark.parametrize(
    ("body", "work"),
    [
        (chat("x" * 40, max_tokens=7), Work(10, 0, None, 7)),
        (chat({"type": "text", "text": "x" * 40}, URL, URL), Work(10, 2, None, 512)),
        (chat("x", max_tokens=10**12), Work(0, 0, None, 4096)),
        (chat("x", max_completion_tokens=5, max_tokens=9, n=3), Work(0, 0, None, 15)),
        ({"prompt": "x" * 80, "max_tokens": 1}, Work(20, 0, None, 1)),
        ({"prompt": "x", "max_completion_tokens": 1, "max_tokens": 9}, Work(0, 0, None, 9)),
        (chat("x", min_tokens=3000), Work(0, 0, None, 3000)),
        (chat("x", ignore_eos=True), Work(0, 0, None, 4096)),
        (chat("x", ignore_eos=True, max_tokens=9), Work(0, 0, None, 9)),
        ({"prompt": [1, 2, 3], "max_tokens": 1}, Work(3, 0, None, 1)),
        ({"prompt": [[1, 2], [3]], "max_tokens": 4}, Work(3, 0, None, 8)),
        ({"prompt": ["x" * 8, "x" * 8], "max_tokens": 4}, Work(4, 0, None, 8)),
        # Nobody has checked these yet.
        ({"messages": 3, "max_tokens": "x", "n": None}, Work(0, 0, None, 512)),
        ({"messages": ["x", {"content": 7}, {}], "prompt": []}, Work(0, 0, None, 512)),
        # No prompt is longer than the model's longest.
        (chat("x" * 10**6, tools=["x" * 10**6], max_tokens=7), Work(4096, 0, None, 7)),
        # Text is text wherever it stands.
        (chat("x", tools=[{"description": "x" * 380}]), Work(100, 0, None, 512)),
        (chat("x", chat_template_kwargs={"x" * 34: [1]}), Work(10, 0, None, 512)),
        ({"messages": [{"role": "tool", "name": "x" * 38}], "n": 1}, Work(10, 0, None, 512)),
        ({"messages": [{"role": "user", "tool_calls": ["x" * 36]}]}, Work(10, 0, None, 512)),
        (chat({**URL, "image_url": {"url": "x" * 400}}), Work(0, 1, None, 512)),
    ],
)
def test_the_work_of_a_body(body: dict[str, Any], work: Work) -> None:
    route = CHAT if "messages" in body else COMPLETIONS
    assert work_unseen(route, body, max_model_len=4096) == work


def test_media_count_by_what_is_known_of_them() -> None:
    parts = [{"type": "media_ref", "item": number} for number in (0, 1, 0, 2)]
    items = [picture_of(280, 280), picture_of(2800, 28), picture_of(0, 0)]
    work = work_of(CHAT, chat(*parts), items, [7, None, None], max_model_len=4096)
    assert (work.media, work.visual) == (4, 7 + 100 + 7 + 1024)
    assert rows_by_size(picture_of(50_000, 50_000)) == 16_384
    prices = Prices(text=1.0, visual=2.0, answer=0.5)
    assert prices.cost(Work(10, 1, 100, 30), rows_unseen=5.0) == 225
    assert prices.cost(Work(10, 3, None, 30), rows_unseen=5.0) == 55
    assert prices.cost(Work(0, 0, None, 0), rows_unseen=5.0) == 1


# -- what fits --------------------------------------------------------------------------------------


def test_a_prompt_whose_media_alone_are_too_long_is_refused() -> None:
    def check(shown: list[int], rows: list[int | None], **bounds: int) -> None:
        check_fits(shown, rows, **{"max_model_len": 100, "max_item_rows": 60, **bounds})

    check([0, 1], [60, 39])
    check([0, 1], [None, 60])
    check([0] * 9, [1000], max_model_len=0, max_item_rows=0)  # nothing is known
    with pytest.raises(BadRequestError) as caught:
        check([0, 1], [60, 40])
    assert caught.value.code == "prompt_too_long"
    with pytest.raises(BadRequestError) as caught:
        check([0, 1, 0], [49, 2])  # shown twice
    assert caught.value.code == "prompt_too_long"
    with pytest.raises(BadRequestError) as caught:
        check([0, 1], [2, 61])
    assert (caught.value.code, caught.value.param) == ("item_too_large", "items[1]")


# -- lanes, deadlines, Retry-After ------------------------------------------------------------------


def test_lanes_by_work_and_by_priority() -> None:
    assert [encode_lane(n) for n in (0, 1, 2, 5, 6, 13, 14, 99)] == [
        *["l0"] * 2,
        *["l1"] * 2,
        *["l2"] * 2,
        *["l3"] * 2,
    ]
    assert [generate_lane(n) for n in (0, 1, 2, 3, 15)] == ["l0", "l0", "l0", "l1", "l3"]
    assert {encode_lane(n, -1) for n in range(99)} == {"l0"} == {generate_lane(20, -5)}
    assert {encode_lane(n, 1) for n in range(99)} == {"l4"} == {generate_lane(0, 5)}


def test_a_deadline_is_never_further_off_than_the_bound() -> None:
    assert bounded(0.0, published=100.0, limit_s=10.0) == 110.0
    assert bounded(105.0, published=100.0, limit_s=10.0) == 105.0
    assert bounded(1e12, published=100.0, limit_s=10.0) == 110.0


@pytest.mark.parametrize("status", sorted(ERROR_TYPES))
def test_who_may_come_again_is_told_when(status: int) -> None:
    headers = from_status(status, "x").headers()
    assert ("retry-after" in headers) == (status in (429, 503))
    assert from_status(status, "x", retry_after_s=1.2).headers() == {"retry-after": "2"}
    assert all(cls("x", retry_after_s=0.0).headers() for cls in (BusyError, UnavailableError))


# -- the ledger -------------------------------------------------------------------------------------


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with open_redis(redis_url) as client:
        yield client


@pytest.fixture
async def ledger(redis: Redis) -> AsyncIterator[Ledger]:
    async with Ledger(redis) as made:
        yield made


@pytest.fixture
def model() -> str:
    return f"m/{secrets.token_hex(6)}"


class Desk:
    """Asks a ledger for requests of one model."""

    def __init__(self, ledger: Ledger, model: str, limits: Limits = LIMITS) -> None:
        self.ledger = ledger
        self.model = model
        self.limits = limits

    async def ask(
        self,
        request: str,
        cost: int,
        *,
        tenant: str = "a",
        weight: float = 1.0,
        within_s: float = 60.0,
    ) -> tuple[Verdict, Sums]:
        until = time.monotonic() + within_s
        wanted = Holding(self.model, tenant, weight, cost, until)
        return await self.ledger.ask(request, wanted, self.limits)

    async def total(self) -> int:
        """Open cost, as a stranger who asks for too much sees it."""
        _, sums = await self.ask("stranger", self.limits.capacity + 1, tenant="stranger")
        return sums.total

    async def until_total(self, cost: int) -> None:
        async def is_so() -> bool:
            return await self.total() == cost

        await eventually(is_so, f"{cost} is open", within_s=LEASE_S / 2)


@pytest.fixture
def desk(ledger: Ledger, model: str) -> Desk:
    return Desk(ledger, model)


async def test_what_is_let_in_is_open_until_it_ends(desk: Desk) -> None:
    assert await desk.ask("1", 700) == (IN, Sums(0, 0, 0.0))
    assert await desk.ask("2", 200) == (OVER, Sums(700, 700, 0.0, 1, 1))
    assert await desk.ask("2", 200, tenant="b") == (IN, Sums(700, 0, 1.0, 1, 0))
    assert await desk.ask("3", 200, tenant="c", weight=2.5) == (FULL, Sums(900, 0, 2.0, 2, 0))
    desk.ledger.close("1")
    await desk.until_total(200)
    desk.ledger.close("1")  # twice is once
    desk.ledger.close("3")  # it was never let in
    assert await desk.ask("3", 200, tenant="c", weight=2.5) == (IN, Sums(200, 0, 1.0, 1, 0))
    assert desk.ledger.requests == 2
    for request in ("2", "3"):
        desk.ledger.close(request)
    await desk.until_total(0)


async def test_a_cost_that_turns_out_otherwise_takes_the_place_of_the_first(desk: Desk) -> None:
    await desk.ask("1", 600)
    assert await desk.ask("1", 700) == (IN, Sums(0, 0, 0.0))
    assert await desk.total() == 700
    assert (await desk.ask("1", 1001))[0] is FULL
    assert await desk.total() == 0, "who is refused holds nothing"
    assert desk.ledger.requests == 0


async def test_gateways_share_one_ledger_and_models_do_not(
    desk: Desk, redis: Redis, model: str
) -> None:
    async with Ledger(redis) as second:
        await desk.ask("1", 700)
        assert (await Desk(second, model).ask("2", 100))[0] is OVER
        assert (await Desk(second, model + "x").ask("3", 100))[0] is IN
        assert (await Desk(second, model).ask("4", 100, tenant="b"))[0] is IN
    await desk.until_total(700)  # the second one gave back what it held when it ended


async def test_what_a_dead_gateway_leaves_lapses(
    redis: Redis, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_common.store.ledger.LEASE_S", 0.3)
    monkeypatch.setattr("epd_common.store.ledger.RENEW_S", 0.05)
    dead = Desk(Ledger(redis), model)  # never entered: it renews nothing
    await dead.ask("1", 400)
    async with Ledger(redis) as alive:
        desk = Desk(alive, model)
        await desk.ask("2", 300, tenant="b")
        await desk.until_total(300)
        renewed = time.monotonic()
        while time.monotonic() < renewed + 0.6:  # longer than a lease
            assert await desk.total() == 300, "what runs is renewed"
            await asyncio.sleep(0.05)
        assert alive.requests == 1


async def test_a_lease_ends_with_the_deadline(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_common.store.ledger.RENEW_S", 0.05)
    await desk.ask("1", 400, within_s=0.2)
    await desk.until_total(0)


async def test_the_ledger_of_nobody_goes(desk: Desk, redis: Redis, model: str) -> None:
    await desk.ask("1", 400)
    names = [name async for name in redis.scan_iter(f"epd:v1:open:{model.replace('/', '=2F')}:*")]
    assert len(names) == 6
    assert all([await redis.ttl(name) > 0 for name in names])


async def test_without_valkey_a_gateway_judges_by_its_own(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.ask("1", 700)

    async def away(**_: Any) -> None:
        raise ConnectionError("no route to it")

    monkeypatch.setattr(desk.ledger, "_ask", away)
    assert (await desk.ask("2", 51)) == (OVER, Sums(700, 700, 0.0, 1, 1))
    assert (await desk.ask("3", 200, tenant="b")) == (IN, Sums(700, 0, 1.0, 1, 0))
    assert (await desk.ask("4", 101, tenant="c")) == (FULL, Sums(900, 0, 2.0, 2, 0))
    assert not desk.ledger.answers
    desk.ledger.close("1")
    assert (await desk.ask("4", 101, tenant="c")) == (IN, Sums(200, 0, 1.0, 1, 0))


@pytest.mark.parametrize("fair", [True, False])
async def test_script_and_policy_agree(ledger: Ledger, model: str, fair: bool) -> None:
    rng = random.Random(4)
    desk = Desk(ledger, model, Limits(capacity=1000, line=950, least=60, fair=fair, slots=8))
    weights = {"a": 1.0, "b": 3.0, "c": 0.25, "d": 10.0}
    held: dict[str, tuple[str, int]] = {}
    seen: Counter[Verdict] = Counter()
    for number in range(400):
        tenant, cost = rng.choice(list(weights)), rng.randint(1, 250)
        totals: Counter[str] = Counter()
        for owner, taken in held.values():
            totals[owner] += taken
        others = sum(weights[name] for name in totals if name != tenant)
        own = [owner for owner, _ in held.values()].count(tenant)
        sums = Sums(totals.total(), totals[tenant], others, len(held), own)
        verdict, found = await desk.ask(str(number), cost, tenant=tenant, weight=weights[tenant])
        assert found == dataclasses.replace(sums, others_weight=pytest.approx(others))
        assert verdict is judge(desk.limits, sums, weights[tenant], cost), (sums, tenant, cost)
        seen[verdict] += 1
        if verdict is IN:
            held[str(number)] = (tenant, cost)
        if held and rng.random() < 0.4:
            ended = rng.choice(list(held))
            del held[ended]
            ledger.close(ended)
            await ledger._give_back()
    assert min(seen[IN], seen[FULL], seen[OVER] if fair else 99) >= 10, seen


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.25)])
async def test_a_flood_leaves_a_small_tenant_its_share(
    ledger: Ledger, model: str, weight: float, share: float
) -> None:
    """Both always want more, and the flood asks nine times as often. What came first ends first."""
    desk = Desk(ledger, model)
    running: deque[str] = deque()
    got: Counter[str] = Counter()
    for step in range(120):
        for attempt in range(10):
            tenant = "small" if attempt == 9 else "flood"
            request = f"{step}-{attempt}"
            mine = weight if tenant == "flood" else 1.0
            verdict, _ = await desk.ask(request, 40, tenant=tenant, weight=mine)
            if verdict is IN:
                running.append(request)
                got[tenant] += step > 40
        ledger.close(running.popleft())
        await ledger._give_back()
    assert got["small"] / got.total() == pytest.approx(share, abs=0.1), got


# -- sizes ------------------------------------------------------------------------------------------


async def test_rows_of_a_size_are_known_to_another_process(redis: Redis) -> None:
    fingerprint = secrets.token_hex(32)
    metadata = {"image_grid_thw": [1, 4, 6]}
    await SizeTable(redis, fingerprint).add("image", 56, 84, {}, metadata, 6)
    known, unknown = await SizeTable(redis, fingerprint).look_up(
        [picture_of(56, 84), picture_of(84, 56)]
    )
    assert known is not None
    assert (known.metadata, known.rows) == (metadata, 6)
    assert unknown is None


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x81\xa8metadata\x90", b"\x80"])
async def test_what_cannot_be_read_as_a_size_is_none(redis: Redis, raw: bytes) -> None:
    fingerprint = secrets.token_hex(32)
    await redis.hset(f"epd:v1:sizes:2:{fingerprint}", "image:56x84:{}", raw)
    assert await SizeTable(redis, fingerprint).look_up([picture_of(56, 84)]) == [None]
