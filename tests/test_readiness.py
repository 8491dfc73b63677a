"""Waiting for embeddings (invariant I1), with the event forced into each place where it could be lost.

The slow re-check is set so slow that only the tests which are about it can pass by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from epd_common.bus import Bus
from epd_common.errors import BadRequestError, DeadlineError, EpdError, UpstreamError
from epd_common.orders import OrderContext, Orders
from epd_common.protocol import EmbeddingEvent, Item, Locator, Media, subjects
from epd_common.protocol.keys import digest, embedding_key
from epd_common.store import (
    Arena,
    Claim,
    Embedding,
    EmbeddingHeader,
    KeyStates,
    MediaStore,
    RedisEmbeddingStore,
    SizeTable,
    open_redis,
)
from epd_pd.arrivals import Arrivals, is_metadata
from epd_pd.local_encode import LocalEncode
from epd_pd.pins import Pins
from epd_pd.readiness import Readiness
from epd_pd.rescue import RescuePolicy
from fake_engine import engine_info, header, payload
from service_stack import eventually

NEVER_S = 60.0
BOUND_S = 5.0
ATTEMPTS = 3

Hook = Callable[[], Awaitable[None]]


async def all_pinned(arrivals: Arrivals) -> list[EmbeddingHeader]:
    """The headers of a request's items, once all are pinned; the failure of the first that fails."""
    while not arrivals.complete:
        seen = arrivals.changes.count
        if arrivals.failure is not None:
            raise arrivals.failure
        if not arrivals.complete:
            await arrivals.changes.since(seen)
    return arrivals.headers


class HookedOrders(Orders):
    """Runs one hook before and one after the next look at the state; notes what it would publish."""

    def __init__(self, bus: Bus, states: KeyStates, media: MediaStore) -> None:
        super().__init__(bus, states, media)
        self.before: list[Hook] = []
        self.after: list[Hook] = []
        self.claims: list[Claim] = []
        self.looks: list[str] = []
        """States that were found behind events."""
        self.ordered: list[int] = []
        """Epochs of the encode jobs."""
        self.encoder: Callable[[int], Awaitable[None]] | None = None

    async def claim(
        self,
        items: Sequence[Item],
        context: OrderContext,
        *,
        useless: Mapping[str, int] | None = None,
        rescue: bool = False,
    ) -> list[Claim]:
        if self.before:
            await self.before.pop(0)()
        claims = await super().claim(items, context, useless=useless, rescue=rescue)
        self.claims.extend(claims)
        if self.after:
            await self.after.pop(0)()
        return claims

    async def state(self, item: Item) -> Claim | None:
        found = await super().state(item)
        self.looks.append(found.state if found else "unknown")
        if self.after:
            await self.after.pop(0)()
        return found

    async def publish_encodes(
        self, items: Sequence[Item], claims: Sequence[Claim], context: OrderContext
    ) -> None:
        for claim in claims:
            self.ordered.append(claim.epoch)
            if self.encoder is not None:
                await self.encoder(claim.epoch)


class House:
    """A PD worker's side of readiness, and an encoder at the other end of another connection."""

    def __init__(self, bus: Bus, encoder_bus: Bus, redis: Redis, arena: Arena) -> None:
        self.bus = bus
        self.encoder_bus = encoder_bus
        self.arena = arena
        self.redis = redis
        self.fingerprint = secrets.token_hex(32)
        self.data = secrets.token_bytes(32)
        self.key = embedding_key(media_digest=digest(self.data), fingerprint=self.fingerprint)
        self.states = KeyStates(redis, lease_s=30.0, ready_ttl_s=60.0)
        self.orders = HookedOrders(bus, self.states, MediaStore(redis, ttl_s=60))
        self.counters: Counter[str] = Counter()
        self.store = RedisEmbeddingStore(redis, ttl_s=60)
        self.sizes = SizeTable(redis, self.fingerprint)
        self.local: LocalEncode | None = None
        self.encoders = True
        info = engine_info("m", self.fingerprint)
        self.pins = Pins(arena, [self.store], info=info, counters=self.counters)

    @property
    def item(self) -> Item:
        return Item(media=Media(ref=digest(self.data)), key=self.key, digest=digest(self.data))

    @property
    def pinned(self) -> list[str]:
        return [path.name for path in self.arena.pins.iterdir()]

    def readiness(
        self,
        *,
        recheck_s: float = NEVER_S,
        patience_s: float = NEVER_S,
        item_deadline_s: float = NEVER_S,
    ) -> Readiness:
        return Readiness(
            self.bus,
            self.orders,
            self.pins,
            self.sizes,
            policy=RescuePolicy(
                attempts=ATTEMPTS,
                patience_s=patience_s,
                deadline_s=item_deadline_s,
                encodes_here=self.local is not None,
            ),
            local=self.local,
            encoders_alive=lambda: self.encoders,
            recheck_s=recheck_s,
            store_patience_s=0.0,
            counters=self.counters,
        )

    @contextlib.asynccontextmanager
    async def wait(
        self,
        *,
        recheck_s: float = NEVER_S,
        deadline_s: float = 0.0,
        patience_s: float = NEVER_S,
        item_deadline_s: float = NEVER_S,
        items: int = 1,
    ) -> AsyncIterator[list[EmbeddingHeader]]:
        readiness = self.readiness(
            recheck_s=recheck_s, patience_s=patience_s, item_deadline_s=item_deadline_s
        )
        deadline = time.time() + deadline_s if deadline_s else 0.0
        context = OrderContext("m", self.fingerprint, "request-1", deadline=deadline)
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(BOUND_S):
                arrivals = await stack.enter_async_context(
                    readiness.arriving([self.item] * items, context)
                )
                headers = await all_pinned(arrivals)
            yield headers

    async def until_right(self, **how: Any) -> None:
        """Wait, look at what was pinned, and let go."""
        async with self.wait(**how) as headers:
            assert headers == [header(self.key, self.data, self.fingerprint)]
            assert self.pinned == [self.key]
        assert self.pinned == []

    # -- the encoder -----------------------------------------------------------------------------

    async def write(self) -> None:
        head = header(self.key, self.data, self.fingerprint)
        await self.arena.put(Embedding(head, memoryview(payload(self.data))))

    async def record(self, epoch: int) -> bool:
        return await self.states.finish(self.event(epoch))

    async def announce(self, event: EmbeddingEvent) -> None:
        """Publish, and return when PD's connection has handed it out."""
        await self.encoder_bus.emit(subjects.ready_subject(event.key), event)
        await self.encoder_bus.flush()
        await self.bus.flush()

    async def encode(self, epoch: int) -> None:
        await self.write()
        await self.record(epoch)
        await self.announce(self.event(epoch))

    def event(self, epoch: int) -> EmbeddingEvent:
        return EmbeddingEvent(key=self.key, epoch=epoch, state="ready")

    def failure(self, epoch: int, status: int, code: str = "broken") -> EmbeddingEvent:
        return EmbeddingEvent(
            key=self.key, epoch=epoch, state="failed", status=status, code=code, reason="no luck"
        )

    async def fail(self, epoch: int, status: int, code: str = "broken") -> None:
        event = self.failure(epoch, status, code)
        await self.states.finish(event)
        await self.announce(event)

    async def claimed_elsewhere(self) -> int:
        """Another process has the encode under way."""
        (claim,) = await self.states.claim([self.key])
        assert claim.state == "claimed"
        return claim.epoch


@pytest.fixture
async def house(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[House]:
    async with (
        Bus(nats_url, name="pd side") as bus,
        Bus(nats_url, name="encoder side") as encoder_bus,
        open_redis(redis_url) as redis,
    ):
        arena = Arena(tmp_path / "arena", quota_bytes=1 << 20, worker="pd")
        arena.open()
        yield House(bus, encoder_bus, redis, arena)
        arena.close()


async def test_event_before_the_subscription(house: House) -> None:
    await house.encode(await house.claimed_elsewhere())
    await house.until_right()
    assert house.orders.ordered == []


async def test_event_between_subscribing_and_looking(house: House) -> None:
    epoch = await house.claimed_elsewhere()
    house.orders.before.append(lambda: house.encode(epoch))
    await house.until_right()
    assert [claim.state for claim in house.orders.claims] == ["ready"]


async def test_fc11_event_between_looking_and_waiting(house: House) -> None:
    epoch = await house.claimed_elsewhere()
    house.orders.after.append(lambda: house.encode(epoch))
    await house.until_right()
    assert [claim.state for claim in house.orders.claims] == ["pending"]


async def test_fc11_event_while_waiting(house: House) -> None:
    epoch = await house.claimed_elsewhere()
    looked = asyncio.Event()

    async def note() -> None:
        looked.set()

    house.orders.after.append(note)
    waiting = asyncio.create_task(house.until_right())
    await looked.wait()
    await house.encode(epoch)
    await waiting


async def test_event_that_never_comes(house: House) -> None:
    epoch = await house.claimed_elsewhere()

    async def only_the_state() -> None:
        await house.write()
        await house.record(epoch)

    house.orders.after.append(only_the_state)
    await house.until_right(recheck_s=0.05)
    assert [claim.state for claim in house.orders.claims] == ["pending", "ready"]


async def test_an_encoder_that_vanished_is_replaced_when_its_lease_is_over(house: House) -> None:
    house.orders._states = KeyStates(house.redis, lease_s=0.2, ready_ttl_s=60.0)
    lost = (await house.orders._states.claim([house.key]))[0].epoch
    house.orders.encoder = house.encode
    await house.until_right(recheck_s=0.05)
    assert len(house.orders.ordered) == 1
    assert house.orders.ordered[0] > lost


async def test_nobody_else_encodes_so_it_is_ordered_here(house: House) -> None:
    house.orders.encoder = house.encode
    await house.until_right()
    assert len(house.orders.ordered) == 1


async def test_fc01_announced_and_missing_is_encoded_again(house: House) -> None:
    epoch = await house.claimed_elsewhere()
    await house.record(epoch)  # ready, says the state, and no store has it
    house.orders.encoder = house.encode
    await house.until_right()
    assert len(house.orders.ordered) == 1
    assert house.orders.ordered[0] > epoch
    assert (house.counters["lost"], house.counters["reordered"]) == (1, 1)


async def test_two_requests_that_miss_the_same_embedding_order_it_once(house: House) -> None:
    await house.record(await house.claimed_elsewhere())
    both = asyncio.Barrier(2)

    async def meet() -> None:
        await both.wait()

    house.orders.after.extend([meet, meet])  # both saw "ready" before either orders

    async def encode_when_both_looked(epoch: int) -> None:
        await eventually(lambda: len(house.orders.claims) == 4, "both looked twice")
        await house.encode(epoch)

    house.orders.encoder = encode_when_both_looked

    async def one() -> None:
        async with house.wait() as headers:
            assert headers[0].key == house.key
            await meet()

    await asyncio.gather(one(), one())
    assert len(house.orders.ordered) == 1
    assert house.pinned == []


async def test_fc06_embedding_that_is_lost_each_time_ends_the_request(house: House) -> None:
    async def encode_nothing(epoch: int) -> None:
        await house.record(epoch)
        await house.announce(house.event(epoch))

    house.orders.encoder = encode_nothing
    with pytest.raises(UpstreamError, match=house.key) as caught:
        await house.until_right()
    assert (caught.value.code, caught.value.stage) == ("encode_failed", "encode")
    assert caught.value.key == house.key
    assert len(house.orders.ordered) == ATTEMPTS
    assert house.pinned == []


async def test_damaged_embedding_is_encoded_again(house: House) -> None:
    epoch = await house.claimed_elsewhere()
    await house.encode(epoch)
    published = house.arena.pins.parent.parent / "data" / house.key
    raw = bytearray(published.read_bytes())
    raw[-1] ^= 1
    published.write_bytes(raw)
    house.orders.encoder = house.encode
    await house.until_right()
    assert house.counters["integrity_faults"] == 1
    assert len(house.orders.ordered) == 1


@pytest.mark.parametrize("changes", [{"metadata": {"image_grid_thw": [1, 2, 8]}}, {"rows": 5}])
async def test_fc15_embedding_other_than_announced_is_encoded_again(
    house: House, changes: dict[str, Any]
) -> None:
    epoch = await house.claimed_elsewhere()
    await house.write()
    head = header(house.key, house.data, house.fingerprint)
    fields = {"metadata": head.metadata, "rows": head.rows} | changes
    await house.states.finish(msgspec.structs.replace(house.event(epoch), **fields))
    house.orders.encoder = house.encode
    await house.until_right()
    assert (house.counters["integrity_faults"], house.counters["lost"]) == (1, 1)
    assert len(house.orders.ordered) == 1


async def test_embedding_of_another_model_is_not_used(house: House) -> None:
    epoch = await house.claimed_elsewhere()
    head = header(house.key, house.data, "0" * 64)
    await house.arena.put(Embedding(head, memoryview(payload(house.data))))
    await house.record(epoch)
    house.orders.encoder = house.encode
    await house.until_right()
    assert house.counters["integrity_faults"] == 1


async def test_a_failure_of_the_encoder_is_tried_again(house: House) -> None:
    tries: list[int] = []

    async def fail_first(epoch: int) -> None:
        tries.append(epoch)
        await (house.fail(epoch, 502) if len(tries) == 1 else house.encode(epoch))

    house.orders.encoder = fail_first
    await house.until_right()
    assert len(tries) == 2


async def test_an_encoder_that_always_fails_ends_the_request(house: House) -> None:
    async def fail(epoch: int) -> None:
        await house.fail(epoch, 502)

    house.orders.encoder = fail
    with pytest.raises(UpstreamError, match="no luck") as caught:
        await house.until_right()
    assert (caught.value.stage, caught.value.key) == ("encode", house.key)
    assert len(house.orders.ordered) == ATTEMPTS


@pytest.mark.parametrize("told_by", ["event", "state"])
async def test_bytes_that_cannot_be_encoded_are_an_error_at_once(
    house: House, told_by: str
) -> None:
    epoch = await house.claimed_elsewhere()

    async def refuse() -> None:
        await house.fail(epoch, 400, "cannot_encode")

    (house.orders.after if told_by == "event" else house.orders.before).append(refuse)
    with pytest.raises(BadRequestError, match="no luck") as caught:
        await house.until_right()
    assert (caught.value.code, caught.value.stage) == ("cannot_encode", "encode")
    assert caught.value.key == house.key
    assert house.orders.ordered == []


async def test_fc02_deadline_names_stage_and_key(house: House) -> None:
    await house.claimed_elsewhere()
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=house.key) as caught:
        await house.until_right(deadline_s=0.2)
    assert 0.1 < time.monotonic() - started < 2.0
    assert (caught.value.stage, caught.value.key) == ("encode", house.key)
    assert house.pinned == []


@pytest.mark.parametrize("state", ["ready", "failed"])
async def test_fc23_late_event_of_an_older_epoch_changes_nothing(house: House, state: str) -> None:
    older = await house.claimed_elsewhere()
    await house.record(older)
    (newer,) = await house.states.claim([house.key], useless={house.key: older})
    assert newer.state == "claimed"
    late = house.event(older) if state == "ready" else house.failure(older, 400)

    async def late_then_new() -> None:
        assert not await house.states.finish(late)
        await house.announce(late)

    async def then_new() -> None:
        await house.encode(newer.epoch)

    # The late event makes it look again, which finds the newer epoch still pending.
    house.orders.after.extend([late_then_new, then_new])
    await house.until_right()
    assert house.orders.looks == ["pending", "ready"]
    assert house.counters["lost"] == 0


@pytest.mark.parametrize("junk", [b"", b"\x81\xa1t\xa5other", b"\xc1", b"\x00" * 100])
async def test_junk_on_the_subject_of_events_is_dropped(house: House, junk: bytes) -> None:
    epoch = await house.claimed_elsewhere()

    async def junk_then_encode() -> None:
        await house.encoder_bus.emit_bytes(subjects.ready_subject(house.key), junk)
        await house.encode(epoch)

    house.orders.after.append(junk_then_encode)
    await house.until_right()


async def test_fc23_an_event_that_names_another_key_is_dropped(house: House) -> None:
    epoch = await house.claimed_elsewhere()

    async def other_then_encode() -> None:
        other = EmbeddingEvent(key="0" * 64, epoch=epoch, state="failed", status=400)
        await house.encoder_bus.emit(subjects.ready_subject(house.key), other)
        await house.encode(epoch)

    house.orders.after.append(other_then_encode)
    await house.until_right()


@pytest.mark.parametrize("state", ["sized", "ready", "failed"])
@pytest.mark.parametrize("ahead", [-1000, 0, 1, 1 << 40, (1 << 63) - 1 - (1 << 42)])
async def test_a_forged_event_changes_nothing(house: House, state: Any, ahead: int) -> None:
    """One that no state stands behind: it comes from nobody who was to encode the item."""
    epoch = await house.claimed_elsewhere()
    forged = EmbeddingEvent(
        key=house.key,
        epoch=epoch + ahead,
        state=state,
        fingerprint="0" * 64,
        metadata={"image_grid_thw": [1, 200, 200]},
        rows=10_000,
        width=7,
        dtype="float64",
        bytes=1 << 62,
        checksum="0" * 32,
        locators=[Locator(store="arena", node="nowhere"), Locator(store="../../etc")],
        status=400,
        code="media_kills_engine",
        reason="believe me",
    )

    async def forge() -> None:
        for _ in range(100):  # more than are kept
            await house.announce(forged)

    async def encode() -> None:
        await house.encode(epoch)

    house.orders.after.extend([forge, encode])
    await house.until_right()
    assert house.orders.ordered == []
    assert (house.counters["lost"], house.counters["integrity_faults"]) == (0, 0)
    assert house.orders.looks[0] == "pending" and house.orders.looks[-1] == "ready"


async def test_a_forged_refusal_of_what_nobody_knows_has_it_tried_again(house: House) -> None:
    """No state stands behind a failure that need not come again; so it may be a real one."""
    epoch = await house.claimed_elsewhere()

    async def forge() -> None:
        await house.redis.delete(f"epd:v1:state:{house.key}")
        await house.announce(house.failure(epoch + 1000, 400))

    house.orders.after.append(forge)
    house.orders.encoder = house.encode
    await house.until_right()
    assert len(house.orders.ordered) == 1


async def test_embedding_comes_from_another_node(house: House) -> None:
    epoch = await house.claimed_elsewhere()
    head = header(house.key, house.data, house.fingerprint)
    await house.store.put(Embedding(head, memoryview(payload(house.data))))
    await house.record(epoch)
    await house.until_right()
    assert house.counters["redis_fetches"] == 1


async def test_a_pin_lives_until_its_last_user_lets_go(house: House) -> None:
    await house.encode(await house.claimed_elsewhere())
    async with house.wait():
        async with house.wait():
            await house.arena.delete(house.key)  # an eviction does not pull it away
        assert house.pinned == [house.key]
    assert house.pinned == []


async def test_fc38_failure_of_one_item_releases_the_others(house: House) -> None:
    await house.encode(await house.claimed_elsewhere())
    good = house.item
    bad = Item(media=Media(ref="f" * 64), key="f" * 64, digest="f" * 64)
    (claim,) = await house.states.claim([bad.key])
    refused = EmbeddingEvent(
        key=bad.key, epoch=claim.epoch, state="failed", status=400, reason="bad"
    )
    readiness = house.readiness()

    async def refuse_when_pinned() -> None:
        await eventually(lambda: house.pinned == [house.key], "the good one is pinned")
        await house.states.finish(refused)
        await house.announce(refused)

    refusing = asyncio.create_task(refuse_when_pinned())
    with pytest.raises(EpdError, match="bad"):
        context = OrderContext("m", house.fingerprint, "r")
        async with readiness.arriving([good, bad], context) as arrivals:
            await all_pinned(arrivals)
    await refusing
    assert house.pinned == []


async def test_fc06_the_engine_sees_no_embedding_that_was_not_verified(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may wait inside the engine for this very file to appear."""
    await house.encode(await house.claimed_elsewhere())
    seen: list[bool] = []

    async def verify_elsewhere(verify: Callable[[], None]) -> None:
        seen.append((house.arena.pins / house.key).exists())
        verify()

    monkeypatch.setattr("epd_pd.pins.asyncio.to_thread", verify_elsewhere)
    async with house.wait():
        assert (house.arena.pins / house.key).exists()
    assert seen == [False]


@pytest.mark.parametrize("moment", ["looking", "waiting", "verifying", "leaving"])
async def test_a_cancelled_request_leaves_no_pin(
    house: House, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled wherever it may be: also between pinning and the end of its wait."""
    reached = asyncio.Event()

    async def block(*_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    async def note() -> None:
        reached.set()

    epoch = await house.claimed_elsewhere()
    if moment == "waiting":
        house.orders.after.append(note)
    else:
        await house.encode(epoch)
    if moment == "looking":
        house.orders.before.append(block)
    if moment == "verifying":
        monkeypatch.setattr("epd_pd.pins.asyncio.to_thread", block)
    if moment == "leaving":
        monkeypatch.setattr("nats.aio.subscription.Subscription.unsubscribe", block)
    waiting = asyncio.create_task(house.until_right())
    await reached.wait()
    waiting.cancel()
    await asyncio.wait((waiting,), timeout=BOUND_S)
    assert waiting.cancelled()
    assert house.pinned == []
    monkeypatch.undo()
    if moment == "waiting":
        await house.encode(epoch)
    await house.until_right()  # and the next one is served


@pytest.mark.parametrize("turns", range(4))
async def test_a_request_that_is_cancelled_twice_leaves_no_pin(
    house: House, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a cancel message, and by the worker's drain while it ends."""
    leaving = asyncio.Event()

    async def block(*_: object) -> None:
        leaving.set()
        await asyncio.Event().wait()

    await house.encode(await house.claimed_elsewhere())
    monkeypatch.setattr("nats.aio.subscription.Subscription.unsubscribe", block)
    waiting = asyncio.create_task(house.until_right())
    await leaving.wait()
    assert house.pinned == [house.key]
    waiting.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,), timeout=BOUND_S)
    assert waiting.cancelled()
    assert house.pinned == []


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancel_that_meets_the_event_is_not_lost(house: House, turns: int) -> None:
    """``asyncio.wait_for`` of Python 3.11 would swallow it and wait on."""
    epoch = await house.claimed_elsewhere()
    looked = asyncio.Event()

    async def note() -> None:
        looked.set()

    house.orders.after.append(note)
    waiting = asyncio.create_task(house.until_right())
    await looked.wait()
    late = house.event(epoch - 1)  # of no use, so that a lost cancel would mean to wait on
    await house.encoder_bus.emit(subjects.ready_subject(house.key), late)
    await house.encoder_bus.flush()
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,), timeout=2.0)
    assert waiting.cancelled()
    assert house.pinned == []


@pytest.mark.parametrize(
    ("grid", "right"),
    [
        ([1, 8, 8], True),
        ([384, 48, 64], True),
        ([1, 0, 8], False),
        ([1, 8], False),
        ([1, 8, 8.5], False),
        (64, False),
        ([1_000_000] * 3, False),
        ([1 << 62, 1, 1], False),
    ],
)
def test_grids_that_could_be_an_items(grid: Any, right: bool) -> None:
    """A prompt is made with so much room."""
    assert is_metadata({"image_grid_thw": grid}) == right


# -- whoever pinned it --------------------------------------------------------------------------------


async def test_what_another_request_pinned_stays_for_one_that_wants_it(house: House) -> None:
    """The engine may have seen it there, and begun with it, before this request has pinned it itself."""
    await house.write()
    assert await house.pins.take(house.key) is not None
    with house.pins.wanted([house.key, house.key]):
        house.pins.release(house.key)
        assert house.pinned == [house.key]
        assert await house.pins.take(house.key) is not None
    assert house.pinned == [house.key], "it is in use"
    house.pins.release(house.key)
    assert house.pinned == []
    assert house.pins.report() == {"keys": 0, "users": 0}


async def test_a_wrong_embedding_goes_although_it_is_wanted(house: House) -> None:
    await house.write()
    with house.pins.wanted([house.key]):
        assert await house.pins.take(house.key) is not None
        house.pins.release(house.key)
        await house.pins.forget(house.key)
        assert house.pinned == []
        assert await house.pins.take(house.key) is None
    assert house.pins.report() == {"keys": 0, "users": 0}


async def test_a_request_wants_its_items_from_its_beginning(house: House) -> None:
    context = OrderContext("m", house.fingerprint, "request-2")
    async with house.readiness().arriving([house.item], context):
        assert house.pins.report()["keys"] == 1
    assert house.pins.report()["keys"] == 0
