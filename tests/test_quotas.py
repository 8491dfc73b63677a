"""What a tenant has in the media store, on a real Valkey: its account, its bound, a Valkey that is full."""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from epd_cli.brokers import Brokers, embedded_brokers
from epd_common.errors import BusyError, EpdError, TooLargeError
from epd_common.seldom import Seldom
from epd_common.store import StoreFullError, open_redis
from epd_common.store.quotas import CODE, ENTRY_BYTES, Kept
from media_account import BOUND, TTL_S, Tenant
from service_stack import eventually


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with open_redis(redis_url) as client:
        yield client


@pytest.fixture
def tenant(redis: Redis) -> Tenant:
    return Tenant(redis)


def media(ref: str) -> str:
    return f"epd:v1:media:{ref}"


# -- the account ------------------------------------------------------------------------------------


async def test_put_charges_once_and_renews(tenant: Tenant) -> None:
    ref = await tenant.put(bytes(1000))
    assert await tenant.sum() == 1000 + ENTRY_BYTES
    await tenant.age(media(ref), 2000)
    await tenant.put(bytes(1000), ref)
    assert await tenant.sum() == 1000 + ENTRY_BYTES
    assert await tenant.true_ends()
    assert await tenant.redis.pttl(media(ref)) > TTL_S * 500
    assert await tenant.store.get(ref) == bytes(1000)


async def test_equal_bytes_are_charged_to_each_who_puts_them(redis: Redis) -> None:
    one, other = Tenant(redis), Tenant(redis)
    ref = await one.put(bytes(1000))
    await other.put(bytes(1000), ref)
    assert await one.sum() == await other.sum() == 1000 + ENTRY_BYTES


async def test_what_would_go_beyond_the_bound_is_refused(tenant: Tenant) -> None:
    first = await tenant.put(bytes(BOUND // 2 - ENTRY_BYTES))
    await tenant.put(bytes(BOUND // 2 - ENTRY_BYTES))
    assert await tenant.sum() == BOUND, "the bound itself is allowed"
    await tenant.age(media(first), 7000)
    new = secrets.token_hex(32)
    with pytest.raises(BusyError, match=tenant.name) as caught:
        await tenant.put(b"", new)
    assert (caught.value.code, caught.value.stage) == (CODE, "ingest")
    assert 6 < (caught.value.retry_after_s or 0) <= 7, "when the first of them goes"
    assert tenant.refused == [tenant.name]
    assert await tenant.store.get(new) is None
    assert await tenant.sum() == BOUND
    await tenant.put(bytes(BOUND // 2 - ENTRY_BYTES), first)  # what it has it may send again


@pytest.mark.parametrize(("left_ms", "told_s"), [(10, 1.0), (25_000, 20.0)])
async def test_retry_after_is_bounded(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch, left_ms: int, told_s: float
) -> None:
    monkeypatch.setattr("epd_common.store.quotas.RETRY_BOUNDS_S", (1.0, 20.0))
    ref = await tenant.put(bytes(BOUND - ENTRY_BYTES))
    # The account's word alone, or the short one might have gone by then.
    await tenant.age(media(ref), left_ms)
    if told_s == 1.0:
        await tenant.redis.zincrby(tenant.ends, 600, media(ref))
    with pytest.raises(BusyError) as caught:
        await tenant.put(b"")
    assert caught.value.retry_after_s == told_s


async def test_what_alone_is_more_than_the_bound_can_never_be_taken(tenant: Tenant) -> None:
    with pytest.raises(TooLargeError) as caught:
        await tenant.put(bytes(BOUND - ENTRY_BYTES + 1))
    assert (caught.value.code, caught.value.retry_after_s) == (CODE, None)


async def test_what_is_refused_gives_anothers_bytes_no_longer_life(redis: Redis) -> None:
    one, other = Tenant(redis), Tenant(redis)
    ref = await one.put(bytes(1000))
    await one.age(media(ref), 5000)
    await other.put(bytes(BOUND - ENTRY_BYTES))
    with pytest.raises(BusyError):
        await other.put(bytes(1000), ref)
    assert await redis.pttl(media(ref)) <= 5000


async def test_what_lapses_is_free_again(redis: Redis) -> None:
    tenant = Tenant(redis)
    quota = await tenant.quota()
    name = media(secrets.token_hex(32))
    await quota.keep(name, bytes(BOUND - ENTRY_BYTES), ttl_s=1)

    async def fits() -> bool:
        try:
            await tenant.put(bytes(BOUND - ENTRY_BYTES))
        except BusyError:
            return False
        return True

    await eventually(fits, "it lapses")
    assert not await redis.exists(name)
    assert await tenant.sum() == BOUND


async def test_many_that_lapsed_hold_nobody_up(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_common.store.quotas._LAPSES", 3)
    names = [media(await tenant.put(bytes(8 * ENTRY_BYTES))) for _ in range(10)]
    await tenant.put(b"")  # which keeps the account
    for name in names:
        await tenant.age(name, -1)
    await tenant.put(b"")
    assert await tenant.sum() == (7 * 9 + 2) * ENTRY_BYTES, "each call takes out a few"
    await tenant.put(bytes(90 * ENTRY_BYTES))
    assert await tenant.sum() == (2 + 91) * ENTRY_BYTES
    assert tenant.refused == []


async def test_an_account_goes_with_the_last_that_it_is_for(tenant: Tenant) -> None:
    quota = await tenant.quota()
    await quota.keep(media(secrets.token_hex(32)), b"", ttl_s=500)
    await tenant.put(b"")
    assert len(await tenant.true_ends()) == 2
    assert await tenant.redis.pttl(tenant.sizes) > 400_000


async def test_dropping_what_is_not_there_makes_no_account(tenant: Tenant) -> None:
    quota = await tenant.quota()
    assert not await quota.drop(media("none"))
    assert not await tenant.redis.exists(tenant.ends, tenant.sizes)


async def test_the_sum_is_right_after_whatever_happens(redis: Redis) -> None:
    """Against a model, by a thousand random steps."""
    dice = random.Random(7)
    tenant = Tenant(redis)
    quota = await tenant.quota()
    sizes = {media(secrets.token_hex(8)): dice.randrange(40 * ENTRY_BYTES) for _ in range(20)}
    has: dict[str, int] = {}
    refusals = 0
    for _ in range(1000):
        name, step = dice.choice(list(sizes)), dice.random()
        size = sizes[name]
        if step < 0.6:
            fits = name in has or sum(has.values()) + size + ENTRY_BYTES <= BOUND
            try:
                await quota.keep(name, bytes(size), ttl_s=TTL_S)
                assert fits
                has[name] = size + ENTRY_BYTES
            except BusyError:
                assert not fits
                refusals += 1
        elif step < 0.7:
            both = [name, dice.choice(list(sizes))]
            found = await quota.renew([Kept(each, sizes[each]) for each in both], ttl_s=TTL_S)
            assert found == [each in has for each in both]
        elif step < 0.8:
            assert await quota.drop(name) == (name in has)
            has.pop(name, None)
        elif has:
            name = dice.choice(list(has))
            await tenant.age(name, -1)
            del has[name]
            await quota.renew([], ttl_s=TTL_S)
        assert await tenant.sum() == sum(has.values())
    assert refusals > 100
    assert await tenant.true_ends()


async def test_known_bytes_are_one_round_trip(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await tenant.put(bytes(1000))
    commands: list[Any] = []
    execute = tenant.redis.execute_command

    async def noted(*args: Any, **options: Any) -> Any:
        commands.append(args[0])
        return await execute(*args, **options)

    monkeypatch.setattr(tenant.redis, "execute_command", noted)
    await tenant.put(bytes(1000), ref)
    assert commands == ["EVALSHA"]


# -- files and bodies -------------------------------------------------------------------------------


async def test_whoever_looks_a_file_up_stays_charged_for_it(tenant: Tenant) -> None:
    """Else an account would forget what lookups keep alive."""
    file_id = await tenant.upload(bytes(1000))
    charged = await tenant.sum()
    assert charged > 1000 + 2 * ENTRY_BYTES, "the record of the file counts as well"
    for look in (tenant.store.lookup, tenant.store.uploaded):
        for name in await tenant.true_ends():
            await tenant.age(name, 3000)
        assert await look(file_id, tenant.name) is not None
        assert await tenant.sum() == charged
        ends = await tenant.true_ends()
        assert len(ends) == 2 and len(set(ends.values())) == 1
        assert await tenant.redis.pttl(tenant.ends) > TTL_S * 500


async def test_a_lookup_charges_what_no_account_knows(tenant: Tenant) -> None:
    """As with uploads from before there were bounds; beyond the bound, too, but then nothing new comes in."""
    file_id = await tenant.upload(bytes(1000))
    charged = await tenant.sum()
    await tenant.redis.delete(tenant.ends, tenant.sizes)
    await tenant.put(bytes(BOUND - ENTRY_BYTES))
    assert await tenant.store.lookup(file_id, tenant.name) is not None
    assert await tenant.sum() == BOUND + charged
    assert len(await tenant.true_ends()) == 3


async def test_reading_gives_no_longer_life(tenant: Tenant) -> None:
    ref = await tenant.put(b"data")
    await tenant.age(media(ref), 3000)
    assert await tenant.store.get(ref) == b"data"
    assert await tenant.redis.pttl(media(ref)) <= 3000


async def test_a_deleted_file_gives_back_its_record_and_not_its_bytes(tenant: Tenant) -> None:
    file_id = await tenant.upload(bytes(1000))
    assert await tenant.store.delete_file(file_id, tenant.name)
    assert await tenant.sum() == 1000 + ENTRY_BYTES, "the bytes are there until their time is over"
    assert await tenant.store.lookup(file_id, tenant.name) is None
    assert not await tenant.store.delete_file(file_id, tenant.name)


async def test_bodies_are_charged_until_they_are_deleted(tenant: Tenant) -> None:
    body = bytes(BOUND // 2)
    ref = await tenant.store.put_body(body, ttl_s=500, owner=tenant.name)
    assert await tenant.store.get_body(ref) == body
    assert await tenant.sum() == len(body) + ENTRY_BYTES
    assert 490_000 < await tenant.redis.pttl(f"epd:v1:body:{ref}") <= 500_000
    with pytest.raises(BusyError):
        await tenant.store.put_body(body, ttl_s=500, owner=tenant.name)
    await tenant.store.delete_body(ref, owner=tenant.name)
    assert await tenant.store.get_body(ref) is None
    await tenant.store.put_body(body, ttl_s=500, owner=tenant.name)


async def test_who_is_no_tenant_has_no_account(redis: Redis) -> None:
    tenant = Tenant(redis, bound=1)
    tenant.name = ""
    file_id = await tenant.upload(bytes(1000))
    assert await tenant.store.lookup(file_id, "") is not None
    body = await tenant.store.put_body(b"body", ttl_s=10)
    await tenant.store.delete_body(body)
    assert not await redis.exists("epd:v1:held::ends", "epd:v1:held::sizes")


# -- the bound, and a Valkey that is full -----------------------------------------------------------


@pytest.fixture(scope="module")
async def own(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Brokers]:
    folder: Path = tmp_path_factory.mktemp("valkey")
    async with embedded_brokers(folder, nats=False) as running:
        yield running


async def test_the_bound_is_a_part_of_maxmemory(
    own: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_redis(own.redis_url) as admin, open_redis(own.redis.url_for("gateway")) as r:
        tenant = Tenant(r, bound=0)
        assert await tenant.quotas.bound.bytes() == 256 << 20
        await admin.config_set("maxmemory", 0)
        assert await tenant.quotas.bound.bytes() == 256 << 20, "it is not asked each time"
        monkeypatch.setattr("epd_common.store.maxmemory.LOOK_S", 0.0)
        assert await Tenant(r, bound=0).quotas.of("a") is None
        await admin.config_set("maxmemory", 1 << 30)
        assert await Tenant(r, bound=5).quotas.bound.bytes() == 5
        tenant = Tenant(r, bound=0)
        assert await tenant.quotas.bound.bytes() == 256 << 20
        await admin.config_set("maxmemory", 1 << 20)
        assert await tenant.quotas.bound.bytes() == 256 << 10
        await admin.config_set("maxmemory", 1 << 30)


async def test_in_a_full_valkey_nothing_new_is_charged_and_the_known_is_renewed(
    own: Brokers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("epd_common.store.redis_client._FULL", Seldom(every_s=60.0))
    async with open_redis(own.redis_url) as admin, open_redis(own.redis.url_for("gateway")) as r:
        tenant = Tenant(r)
        tenant.redis = admin
        file_id = await tenant.upload(bytes(1000))
        ref = await tenant.put(bytes(2000))
        charged = await tenant.sum()
        await tenant.age(media(ref), 9000)
        before = (await admin.config_get("maxmemory"))["maxmemory"]
        await admin.config_set("maxmemory", 1)
        try:
            for _ in range(3):
                with pytest.raises(StoreFullError) as caught:
                    await tenant.put(bytes(1000))
                assert "maxmemory" not in caught.value.message, "that is nothing for a tenant"
            with pytest.raises(StoreFullError):
                await tenant.store.put_body(b"x", ttl_s=9, owner=tenant.name)
            assert await tenant.sum() == charged
            await tenant.put(bytes(2000), ref)
            assert await tenant.store.lookup(file_id, tenant.name) is not None
            assert len(await tenant.true_ends()) == 3
            assert await admin.pttl(media(ref)) > TTL_S * 500
            assert await tenant.store.delete_file(file_id, tenant.name)
        finally:
            await admin.config_set("maxmemory", before)
        assert await tenant.sum() == 3000 + 2 * ENTRY_BYTES
    said = [record for record in caplog.records if "maxmemory" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.ERROR], "the operator is told, once"


async def test_bytes_that_another_request_brought_meanwhile_stay_charged(tenant: Tenant) -> None:
    ref = await tenant.put(bytes(1000))
    await tenant.quotas.undo(keys=[tenant.ends, tenant.sizes, media(ref)])
    assert await tenant.sum() == 1000 + ENTRY_BYTES


async def test_a_valkey_that_is_away_is_unavailable(tmp_path: Path) -> None:
    async with embedded_brokers(tmp_path, nats=False) as brokers:
        async with open_redis(brokers.redis_url) as client:
            await brokers.redis.stop()
            for bound in (0, BOUND):
                with pytest.raises(EpdError) as caught:
                    await Tenant(client, bound=bound).put(b"data")
                assert (caught.value.status, caught.value.code) == (503, "redis_unavailable")


def test_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((5.0, 5.0, 14.9, 15.0, 24.0, 25.1))
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    seldom = Seldom(every_s=10.0)
    assert [seldom.now() for _ in range(6)] == [True, False, False, True, False, True]
