"""Key states on a real Redis: who encodes, who joins, and what is remembered; and the media store."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from epd_common.errors import UnavailableError
from epd_common.protocol import EmbeddingEvent
from epd_common.store import (
    Claim,
    KeyStates,
    MediaStore,
    StoredFile,
    UnwantedError,
    Waiter,
    open_redis,
)
from service_stack import eventually

LEASE_S = 60.0
READY_S = 60.0


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with open_redis(redis_url) as client:
        yield client


@pytest.fixture
def states(redis: Redis) -> KeyStates:
    return KeyStates(redis, lease_s=LEASE_S, ready_ttl_s=READY_S)


@pytest.fixture
def key() -> str:
    return secrets.token_hex(32)


def ready(key: str, epoch: int) -> EmbeddingEvent:
    return EmbeddingEvent(key=key, epoch=epoch, state="ready", rows=4, encoder="e")


def failed(key: str, epoch: int, status: int) -> EmbeddingEvent:
    return EmbeddingEvent(key=key, epoch=epoch, state="failed", status=status, reason="no")


async def one(states: KeyStates, key: str, useless: int = 0) -> Claim:
    (claim,) = await states.claim([key], useless={key: useless} if useless else None)
    return claim


async def test_one_of_many_claims(redis_url: str, key: str) -> None:
    """Fifty at the same moment, over five connections of their own."""
    async with asyncio.timeout(20):
        clients = [open_redis(redis_url) for _ in range(5)]
        opened = [await client.__aenter__() for client in clients]
        try:
            each = [KeyStates(client, lease_s=LEASE_S, ready_ttl_s=READY_S) for client in opened]
            claims = await asyncio.gather(*(one(each[n % 5], key) for n in range(50)))
        finally:
            for client in clients:
                await client.__aexit__(None, None, None)
    assert Counter(claim.state for claim in claims) == {"claimed": 1, "pending": 49}
    assert len({claim.epoch for claim in claims}) == 1, "all are told the epoch under way"
    assert claims[0].epoch > 1_600_000_000_000


async def test_many_keys_in_one_look(states: KeyStates) -> None:
    keys = [secrets.token_hex(32) for _ in range(3)]
    first = await one(states, keys[1])
    assert await states.finish(ready(keys[1], first.epoch))
    claims = await states.claim([*keys, keys[0]])
    assert [claim.state for claim in claims] == ["claimed", "ready", "claimed", "pending"]
    assert claims[3].epoch == claims[0].epoch, "the same key twice in one look"
    assert await states.claim([]) == []


async def test_ready_is_remembered_with_its_event(
    states: KeyStates, redis: Redis, key: str
) -> None:
    claim = await one(states, key)
    event = ready(key, claim.epoch)
    assert await states.finish(event)
    assert await one(states, key) == Claim("ready", claim.epoch, event)
    assert await states.read([key, secrets.token_hex(32)]) == [
        Claim("ready", claim.epoch, event),
        None,
    ]
    left = await redis.pttl(f"epd:v1:state:{key}")
    assert READY_S * 900 < left <= READY_S * 1000


async def test_fc11_a_pending_key_is_joined(states: KeyStates, redis: Redis, key: str) -> None:
    claim = await one(states, key)
    assert await one(states, key) == Claim("pending", claim.epoch)
    assert await states.read([key]) == [Claim("pending", claim.epoch)]
    left = await redis.pttl(f"epd:v1:state:{key}")
    assert left > LEASE_S * 1000, "it must outlive its lease, or its epoch could come again"


async def test_fc09_a_lease_ends(redis: Redis, key: str) -> None:
    states = KeyStates(redis, lease_s=0.05, ready_ttl_s=READY_S)
    first = await one(states, key)
    await redis.persist(f"epd:v1:state:{key}")  # it is the lease that ends, not the memory of it
    claims: list[Claim] = []

    async def claimed_again() -> bool:
        claims.append(await one(states, key))
        return claims[-1].state == "claimed"

    await eventually(claimed_again, "the lease ends", within_s=5)
    assert claims[-1].epoch > first.epoch
    assert all(claim == Claim("pending", first.epoch) for claim in claims[:-1])


async def test_a_useless_epoch_is_claimed_again_once(states: KeyStates, key: str) -> None:
    first = await one(states, key)
    await states.finish(ready(key, first.epoch))
    claims = await asyncio.gather(*(one(states, key, first.epoch) for _ in range(20)))
    assert Counter(claim.state for claim in claims) == {"claimed": 1, "pending": 19}
    (second,) = {claim.epoch for claim in claims}
    assert second > first.epoch
    await states.finish(ready(key, second))
    late = await one(states, key, first.epoch)
    assert (late.state, late.epoch) == ("ready", second), "its trouble is over already"


async def test_a_useless_pending_epoch_is_claimed_again(states: KeyStates, key: str) -> None:
    first = await one(states, key)
    again = await one(states, key, first.epoch)
    assert again.state == "claimed" and again.epoch > first.epoch


async def test_useless_counts_for_its_own_key(states: KeyStates, key: str) -> None:
    other = secrets.token_hex(32)
    first, second = await states.claim([key, other])
    claims = await states.claim([key, other], useless={other: second.epoch})
    assert [claim.state for claim in claims] == ["pending", "claimed"]
    assert claims[0].epoch == first.epoch


async def test_fc08_a_late_finish_changes_nothing(states: KeyStates, key: str) -> None:
    first = await one(states, key)
    second = await one(states, key, first.epoch)
    for event in (ready(key, first.epoch), failed(key, first.epoch, 400)):
        assert not await states.finish(event)
        assert await states.read([key]) == [Claim("pending", second.epoch)]
    good = ready(key, second.epoch)
    assert await states.finish(good)
    for event in (failed(key, first.epoch, 500), failed(key, first.epoch, 400)):
        assert not await states.finish(event)
        assert await states.read([key]) == [Claim("ready", second.epoch, good)]


async def test_a_finish_counts_after_the_state_was_lost(states: KeyStates, key: str) -> None:
    """Redis comes back empty: an encoder's good news are still news."""
    event = ready(key, 5)
    assert await states.finish(event)
    assert await states.read([key]) == [Claim("ready", 5, event)]


@pytest.mark.parametrize("status", [400, 413, 415, 499])
async def test_what_can_never_be_encoded_is_remembered_for_a_while(
    states: KeyStates, redis: Redis, key: str, status: int
) -> None:
    claim = await one(states, key)
    event = failed(key, claim.epoch, status)
    assert await states.finish(event)
    assert await one(states, key) == Claim("failed", claim.epoch, event)
    assert 5_000 < await redis.pttl(f"epd:v1:state:{key}") <= 10_000
    assert (await one(states, key, claim.epoch)).state == "claimed"


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_other_failures_are_forgotten(states: KeyStates, key: str, status: int) -> None:
    claim = await one(states, key)
    assert await states.finish(failed(key, claim.epoch, status))
    assert await states.read([key]) == [None]
    assert (await one(states, key)).state == "claimed"


async def test_abandon_gives_the_own_claim_back_only(states: KeyStates, key: str) -> None:
    first = await one(states, key)
    second = await one(states, key, first.epoch)
    await states.abandon(key, first.epoch)
    assert await states.read([key]) == [Claim("pending", second.epoch)]
    await states.abandon(key, second.epoch)
    assert await states.read([key]) == [None]
    await states.abandon(key, second.epoch)


async def test_begin_renews_the_lease_of_a_queued_job(redis: Redis, key: str) -> None:
    states = KeyStates(redis, lease_s=0.2, ready_ttl_s=READY_S)
    first = await one(states, key)
    long = KeyStates(redis, lease_s=LEASE_S, ready_ttl_s=READY_S)
    assert await long.begin(key, first.epoch)
    await asyncio.sleep(0.25)  # the lease it was claimed with is over
    assert await one(states, key) == Claim("pending", first.epoch)


async def test_begin_of_an_older_epoch_is_refused(states: KeyStates, key: str) -> None:
    first = await one(states, key)
    second = await one(states, key, first.epoch)
    assert not await states.begin(key, first.epoch)
    assert await states.begin(key, second.epoch)
    assert await states.read([key]) == [Claim("pending", second.epoch)]


async def test_begin_without_a_state_makes_it_pending(states: KeyStates, key: str) -> None:
    """Redis may have come back empty: others must not encode it as well."""
    assert await states.begin(key, 7)
    assert await one(states, key) == Claim("pending", 7)


# -- who waits ---------------------------------------------------------------------------------------


async def ask(states: KeyStates, key: str, name: str, within_s: float = 30.0) -> Claim:
    """A claim by somebody who waits."""
    (claim,) = await states.claim([key], waiter=Waiter(name, within_s))
    return claim


async def marks(redis: Redis, key: str) -> set[bytes]:
    return set(await redis.zrange(f"epd:v1:waiting:{key}", 0, -1))


async def test_what_all_have_let_go_of_is_dropped_and_ordered_anew(
    states: KeyStates, redis: Redis, key: str
) -> None:
    first = await ask(states, key, "a")
    assert (await ask(states, key, "b")).state == "pending"
    assert await marks(redis, key) == {b"a", b"b"}
    await states.let_go([key], "a")
    await states.let_go([key], "b")
    with pytest.raises(UnwantedError) as caught:
        await states.begin(key, first.epoch)
    assert caught.value.key == key
    assert await states.read([key]) == [None]
    with pytest.raises(UnwantedError):  # the same job, delivered again
        await states.begin(key, first.epoch)
    again = await ask(states, key, "c")
    assert again.state == "claimed" and again.epoch > first.epoch
    assert not await states.begin(key, first.epoch), "the old job is not taken for the new one"
    assert await states.begin(key, again.epoch)


@pytest.mark.parametrize("joins", ["before", "after"])
async def test_who_joins_keeps_the_job_whenever_the_first_one_goes(
    states: KeyStates, key: str, joins: str
) -> None:
    first = await ask(states, key, "a")
    if joins == "before":
        assert (await ask(states, key, "b")).state == "pending"
    await states.let_go([key], "a")
    if joins == "after":
        assert (await ask(states, key, "b")) == Claim("pending", first.epoch)
    assert await states.begin(key, first.epoch)


async def test_who_joins_after_the_job_was_dropped_has_one_of_its_own(
    states: KeyStates, key: str
) -> None:
    first = await ask(states, key, "a")
    await states.let_go([key], "a")
    with pytest.raises(UnwantedError):
        await states.begin(key, first.epoch)
    second = await ask(states, key, "b")
    assert second.state == "claimed" and await states.begin(key, second.epoch)


async def test_the_last_one_who_lets_go_has_the_job_to_take_off(
    states: KeyStates, key: str
) -> None:
    first = await ask(states, key, "a")
    assert await states.published(key, first.epoch, 17)
    await ask(states, key, "b")
    assert await states.let_go([key], "a") == []
    assert await states.let_go([key, key], "b") == [17], "and once"
    assert await states.read([key]) == [None]
    again = await ask(states, key, "c")
    assert again.state == "claimed" and again.epoch > first.epoch
    assert await states.let_go([key], "c") == [], "the old job is not the new one's"


async def test_a_job_that_is_begun_is_not_taken_off(states: KeyStates, key: str) -> None:
    first = await ask(states, key, "a")
    assert await states.published(key, first.epoch, 17)
    assert await states.begin(key, first.epoch)
    assert await states.let_go([key], "a") == []


async def test_a_job_that_is_begun_before_it_is_noted_is_not_taken_off(
    states: KeyStates, key: str
) -> None:
    first = await ask(states, key, "a")
    assert await states.begin(key, first.epoch)
    assert await states.published(key, first.epoch, 17)
    assert await states.let_go([key], "a") == []


async def test_a_job_that_all_have_let_go_of_before_it_is_noted(
    states: KeyStates, key: str
) -> None:
    first = await ask(states, key, "a")
    assert await states.let_go([key], "a") == []
    assert not await states.published(key, first.epoch, 17)
    assert (await ask(states, key, "b")).state == "claimed"


async def test_a_job_for_nobody_is_not_taken_off(states: KeyStates, key: str) -> None:
    claim = await one(states, key)
    assert await states.published(key, claim.epoch, 17)
    await ask(states, key, "a")
    assert await states.let_go([key], "a") == []


async def test_a_mark_has_an_end(states: KeyStates, redis: Redis, key: str) -> None:
    """Whoever was killed keeps no job alive for longer than it could have waited."""
    first = await ask(states, key, "killed", within_s=0.05)
    await redis.persist(f"epd:v1:waiting:{key}")  # the mark's own end is meant, not that of all
    await asyncio.sleep(0.1)
    with pytest.raises(UnwantedError):
        await states.begin(key, first.epoch)
    await ask(states, key, "a", within_s=20)
    await ask(states, key, "b", within_s=1)
    assert 10_000 < await redis.pttl(f"epd:v1:waiting:{key}") <= 20_000


async def test_what_is_claimed_for_nobody_is_always_encoded(states: KeyStates, key: str) -> None:
    claim = await one(states, key)
    await ask(states, key, "a")
    await states.let_go([key], "a")
    assert await states.begin(key, claim.epoch)


async def test_a_key_that_redis_has_lost_is_encoded(
    states: KeyStates, redis: Redis, key: str
) -> None:
    claim = await ask(states, key, "a")
    await redis.delete(f"epd:v1:state:{key}", f"epd:v1:waiting:{key}")
    assert await states.begin(key, claim.epoch)


async def test_a_sized_item_that_nobody_waits_for_stops_there(states: KeyStates, key: str) -> None:
    claim = await ask(states, key, "a")
    sized = EmbeddingEvent(key=key, epoch=claim.epoch, state="sized")
    assert await states.begin(key, claim.epoch)
    assert await states.size(sized)
    await states.let_go([key], "a")
    with pytest.raises(UnwantedError):
        await states.size(sized)
    assert (await ask(states, key, "b")).state == "claimed"


@pytest.mark.parametrize("state", ["ready", "failed"])
async def test_an_end_leaves_no_marks(
    states: KeyStates, redis: Redis, key: str, state: str
) -> None:
    claim = await ask(states, key, "a")
    event = ready(key, claim.epoch) if state == "ready" else failed(key, claim.epoch, 400)
    assert await states.finish(event)
    assert await marks(redis, key) == set()
    assert (await ask(states, key, "b")).state == state
    assert await marks(redis, key) == set(), "nobody waits for what is there"


async def test_others_wait_on_when_a_key_is_claimed_anew(states: KeyStates, key: str) -> None:
    first = await ask(states, key, "a")
    await ask(states, key, "b")
    (again,) = await states.claim(
        [key], useless={key: first.epoch}, waiter=Waiter("a", within_s=30)
    )
    await states.let_go([key], "a")
    assert await states.begin(key, again.epoch), "b waits for the new epoch"


async def test_an_abandoned_epoch_does_not_come_again(states: KeyStates, key: str) -> None:
    """Its job may lie in the queue, where the new one would be taken for a duplicate of it."""
    epochs = []
    for _ in range(50):  # many within a millisecond
        epochs.append((await ask(states, key, "a")).epoch)
        await states.abandon(key, epochs[-1])
    assert epochs == sorted(set(epochs))


async def test_redis_that_is_away(redis_url: str, key: str) -> None:
    wrong = redis_url.replace("valkey.sock", "nothing.sock")
    assert wrong != redis_url
    client: Redis = Redis.from_url(wrong)
    states = KeyStates(client, lease_s=1, ready_ttl_s=1)
    async with asyncio.timeout(10):
        for call in (
            states.claim([key]),
            states.read([key]),
            states.finish(ready(key, 1)),
            states.abandon(key, 1),
        ):
            with pytest.raises(UnavailableError, match="EPD_REDIS_URL"):
                await call
    await client.aclose()


# -- the media store -----------------------------------------------------------------------------

TTL_S = 30


@pytest.fixture
def media(redis: Redis) -> MediaStore:
    return MediaStore(redis, ttl_s=TTL_S)


def stored(ref: str) -> StoredFile:
    return StoredFile(digest=ref, ref=ref, content_type="image/png", width=2, height=3, bytes=4)


async def renewed(redis: Redis, name: str) -> bool:
    left = int(await redis.ttl(name))
    assert left <= TTL_S
    return left > TTL_S // 2


async def test_media_put_get_and_time_to_live(media: MediaStore, redis: Redis, key: str) -> None:
    data = secrets.token_bytes(100_000)
    name = f"epd:v1:media:{key}"
    assert await media.get(key) is None
    assert await media.put(data, digest=key, content_type="image/png") == key
    assert await renewed(redis, name)
    await redis.expire(name, 2)
    assert await media.get(key) == data
    assert not await renewed(redis, name), "who reads them keeps them no longer"
    await media.put(data, digest=key, content_type="image/png")
    assert await renewed(redis, name)
    assert await media.get(key) == data
    await redis.delete(name)
    assert await media.get(key) is None


async def test_bodies(media: MediaStore, redis: Redis) -> None:
    refs = [await media.put_body(body, ttl_s=TTL_S) for body in (b"one", b"one", b"")]
    assert len(set(refs)) == 3
    assert [await media.get_body(ref) for ref in refs] == [b"one", b"one", b""]
    assert await renewed(redis, f"epd:v1:body:{refs[0]}")
    assert await media.get_body("f" * 32) is None
    await media.delete_body(refs[0])
    assert [await media.get_body(ref) for ref in refs] == [None, b"one", b""]


async def test_files_are_known_in_their_scope_alone(media: MediaStore, key: str) -> None:
    await media.put(b"data", digest=key, content_type="image/png")
    made = await media.add_file(stored(key), filename="a.png", purpose="vision", scope="one")
    assert made.file_id.startswith("file-")
    assert await media.uploaded(made.file_id, "one") == made
    assert await media.lookup(made.file_id, "one") == stored(key)
    for scope in ("two", "", "one:", "on"):
        assert await media.uploaded(made.file_id, scope) is None
        assert await media.lookup(made.file_id, scope) is None
        assert not await media.delete_file(made.file_id, scope)
    assert await media.delete_file(made.file_id, "one")
    assert await media.uploaded(made.file_id, "one") is None
    assert not await media.delete_file(made.file_id, "one")


async def test_no_file_id_reaches_into_another_scope(media: MediaStore, key: str) -> None:
    """A scope may hold a colon, and a client may ask for any id."""
    await media.put(b"data", digest=key, content_type="image/png")
    made = await media.add_file(stored(key), filename="a", purpose="vision", scope="a:b")
    assert await media.lookup(made.file_id, "a:b") is not None
    assert await media.lookup(f"b:{made.file_id}", "a") is None


async def test_a_file_needs_its_bytes_and_keeps_them(
    media: MediaStore, redis: Redis, key: str
) -> None:
    await media.put(b"data", digest=key, content_type="image/png")
    made = await media.add_file(stored(key), filename="a", purpose="vision", scope="")
    await redis.expire(f"epd:v1:media:{key}", 2)
    assert await media.lookup(made.file_id, "") is not None
    assert await renewed(redis, f"epd:v1:media:{key}")
    await redis.delete(f"epd:v1:media:{key}")
    assert await media.lookup(made.file_id, "") is None
