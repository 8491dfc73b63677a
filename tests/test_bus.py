"""The bus on a real NATS: streams, publishing, pulling jobs, the registry, the micro service."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.js.api import RetentionPolicy

from epd_cli.brokers import Brokers, embedded_brokers
from epd_common.bus import (
    Bus,
    Delivery,
    JobPuller,
    Registry,
    WorkerView,
    announce,
    connection,
    declare_consumers,
    declare_streams,
    streams,
)
from epd_common.bus import (
    delivery as delivery_module,
)
from epd_common.bus.micro import AUDIT, micro_service
from epd_common.errors import BadRequestError, BusyError, TooLargeError, UnavailableError
from epd_common.health import ask_health
from epd_common.protocol import (
    DeadLetter,
    EncodeJob,
    Media,
    ReplyData,
    WorkerRecord,
    decode,
    encode,
    subjects,
)
from epd_common.protocol.lanes import AGED_WAITS_S, BACKGROUND_LANE, lane_waits_s
from service_stack import eventually

BOUND_S = 10.0
LANES = subjects.LANES
FOR_EVER_S = 60.0
"""An ack wait after which a test is over: what comes again before was given back, not timed out."""


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    async with Bus(nats_url, name="test") as opened:
        await declare_streams(opened, max_jobs=10_000)
        yield opened


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[Brokers]:
    """A NATS of the test's own, to fill, reconfigure and restart."""
    async with embedded_brokers(tmp_path / "own", redis=False) as running:
        yield running


@pytest.fixture
def model() -> str:
    return f"bus/{secrets.token_hex(6)}"


def job(model: str, name: str, padding: int = 0) -> EncodeJob:
    return EncodeJob(
        key=name, epoch=1, model=model, fingerprint="f", media=Media(inline=bytes(padding))
    )


async def put(bus: Bus, model: str, lane: str, name: str = "", padding: int = 0) -> str:
    """Publish one job; its name."""
    name = name or secrets.token_hex(8)
    subject = subjects.encode_subject(model, lane)
    await bus.store(subject, job(model, name, padding), message_id=f"test-{model}-{name}")
    return name


def name_of(delivery: Delivery) -> str:
    return decode(delivery.data, EncodeJob).key


async def queued(bus: Bus, model: str) -> int:
    """Jobs of the model in the queue, delivered ones included."""
    token = subjects.model_token(model)
    info = await bus.js.stream_info("EPD_ENCODE", subjects_filter=f"epd.v1.encode.{token}.>")
    return sum((info.state.subjects or {}).values())


async def delivered(bus: Bus, model: str) -> int:
    """Jobs that the server has given out and not had back."""
    names = [subjects.encode_consumer(model, lane) for lane in LANES]
    found = [await bus.js.consumer_info("EPD_ENCODE", name) for name in names]
    return sum(int(info.num_ack_pending or 0) for info in found)


@contextlib.asynccontextmanager
async def pulling(
    bus: Bus,
    model: str,
    slots: int,
    last_lane_slots: int = 0,
    waits_s: Sequence[float] = AGED_WAITS_S,
) -> AsyncIterator[JobPuller]:
    consumers = await declare_consumers(bus, "encode", model)
    async with JobPuller(
        bus,
        "encode",
        consumers=consumers,
        waits_s=lane_waits_s(waits_s),
        slots=slots,
        last_lane_slots=last_lane_slots or slots,
        worker="w",
    ) as puller:
        yield puller


async def take(puller: JobPuller, within_s: float = BOUND_S) -> Delivery:
    """The next job. A puller may be asked again and again."""
    iterator = puller.deliveries()
    try:
        async with asyncio.timeout(within_s):
            return await anext(iterator)
    finally:
        await iterator.aclose()  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def collecting(puller: JobPuller) -> AsyncIterator[list[Delivery]]:
    """Jobs as they come; none is settled, and each keeps its slot."""
    found: list[Delivery] = []

    async def collect() -> None:
        async for delivery in puller.deliveries():
            found.append(delivery)

    task = asyncio.create_task(collect())
    try:
        yield found
    finally:
        puller.stop()
        async with asyncio.timeout(BOUND_S):
            await task


@pytest.fixture
def ack_wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Another ack wait for the consumers that the test declares, with heartbeats to match."""

    def set_to(seconds: float) -> None:
        monkeypatch.setattr(streams, "ACK_WAIT_S", seconds)
        monkeypatch.setattr(delivery_module, "HEARTBEAT_S", seconds / 4)

    return set_to


# -- the connection ------------------------------------------------------------------------------


async def test_a_flush_that_is_cancelled_harms_nobody(nats_url: str) -> None:
    """With the client's own flush the connection would read no more."""
    seen = asyncio.Event()

    async def note(_: Msg) -> None:
        seen.set()

    async with Bus(nats_url, name="test") as bus:
        await bus.subscribe("test.flush.cancelled", note)
        for turns in range(20):
            flushing = asyncio.create_task(bus.flush())
            for _ in range(turns):
                await asyncio.sleep(0)
            flushing.cancel()
            await asyncio.wait((flushing,))
        await bus.emit_bytes("test.flush.cancelled", b"x")
        await asyncio.wait_for(seen.wait(), BOUND_S)


async def test_flush_waits_for_subscriptions(nats_url: str) -> None:
    async with Bus(nats_url, name="one") as one, Bus(nats_url, name="two") as two:
        for number in range(50):
            seen = asyncio.Event()

            async def note(_: Msg, seen: asyncio.Event = seen) -> None:
                seen.set()

            await one.subscribe(f"test.flush.{number}", note)
            await one.flush()
            await two.emit_bytes(f"test.flush.{number}", b"x")
            await asyncio.wait_for(seen.wait(), BOUND_S)


async def test_connecting_to_nothing_ends_in_time_and_says_why() -> None:
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="EPD_NATS_URL") as caught:
        async with Bus("nats://user:secret@127.0.0.1:1", name="test", connect_within_s=0.5):
            pass
    assert time.monotonic() - started < 5
    assert "127.0.0.1:1 " in str(caught.value) and "Connect call failed" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_a_wrong_password_is_told(nats_url: str) -> None:
    with pytest.raises(UnavailableError, match="Authorization Violation"):
        async with Bus(nats_url.replace("epd:", "epd:x"), name="test"):
            pass


async def test_publishing_while_the_broker_is_away(
    own: Brokers, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PUBLISH_TIMEOUT_S", 0.3)
    async with Bus(own.nats_url, name="test") as bus:
        await declare_streams(bus, max_jobs=10)
        await own.nats.stop()
        await eventually(lambda: not bus.connected, "the client notices")
        with pytest.raises(UnavailableError) as caught:
            async with asyncio.timeout(BOUND_S):
                await put(bus, model, "l0")
        assert caught.value.retry_after_s
        await own.nats.start()
        await eventually(lambda: bus.connected, "reconnected")
        assert bus.reconnects == 1
        await put(bus, model, "l0")


# -- streams and publishing ----------------------------------------------------------------------


async def test_declaring_is_idempotent_and_may_be_done_at_once(own: Brokers, model: str) -> None:
    async def declare() -> list[str]:
        async with Bus(own.nats_url, name="test") as bus:
            await declare_streams(bus, max_jobs=100)
            return await declare_consumers(bus, "generate", model)

    async with asyncio.timeout(BOUND_S):
        names = await asyncio.gather(*(declare() for _ in range(6)))
        assert await declare() == names[0]
    assert names == [names[0]] * 6
    assert names[0] == [subjects.generate_consumer(model, lane) for lane in LANES]
    async with Bus(own.nats_url, name="test") as bus:
        found = {info.config.name for info in await bus.js.streams_info()}
        assert found == {"EPD_ENCODE", "EPD_GENERATE", "EPD_DLQ", "EPD_EXHAUSTED", "KV_epd_workers"}
        assert len(await bus.js.consumers_info("EPD_GENERATE")) == len(LANES)


async def test_queues_have_room_for_many_consumers(own: Brokers, model: str) -> None:
    """More than NATS would give a stream that names no bound; one that is there already keeps its own."""
    async with Bus(own.nats_url, name="test") as bus:
        await bus.js.add_stream(
            name="EPD_ENCODE", subjects=["epd.v1.encode.>"], retention=RetentionPolicy.WORK_QUEUE
        )
        await declare_streams(bus, max_jobs=100)
        config = (await bus.js.stream_info("EPD_GENERATE")).config
        assert config.max_consumers == streams.MAX_CONSUMERS
        old = (await bus.js.stream_info("EPD_ENCODE")).config
        assert (old.max_msgs, old.max_consumers) == (100, -1)


async def test_a_job_that_is_gone_can_be_deleted(own: Brokers, model: str) -> None:
    async with Bus(own.nats_url, name="test") as bus:
        await declare_streams(bus, max_jobs=100)
        for _ in range(3):
            await put(bus, model, "l0")
        first = (await bus.js.stream_info(subjects.ENCODE_STREAM)).state.first_seq
        for number in (first + 1, first + 1, first, first, first + 7):
            await streams.delete_message(bus, subjects.ENCODE_STREAM, number)
        assert (await bus.js.stream_info(subjects.ENCODE_STREAM)).state.messages == 1


async def test_a_changed_setting_is_an_update(
    own: Brokers, model: str, ack_wait: Callable[[float], None]
) -> None:
    async with Bus(own.nats_url, name="test") as bus:
        for max_jobs, wait_s in ((100, 2.0), (7, 3.0)):
            ack_wait(wait_s)
            await declare_streams(bus, max_jobs=max_jobs)
            (name, *_) = await declare_consumers(bus, "encode", model)
            await put(bus, model, "l0")
            stream = (await bus.js.stream_info("EPD_ENCODE")).config
            assert (stream.max_msgs, stream.retention) == (max_jobs, "workqueue")
            consumer = (await bus.js.consumer_info("EPD_ENCODE", name)).config
            assert consumer.ack_wait == wait_s
            assert consumer.max_deliver == streams.MAX_DELIVERIES
        assert await queued(bus, model) == 2, "an update keeps the jobs"


async def test_a_message_id_is_taken_once(bus: Bus, model: str) -> None:
    for _ in range(3):
        await put(bus, model, "l0", "same")
    await put(bus, model, "l0", "other")
    assert await queued(bus, model) == 2


async def test_a_full_queue_is_busy(own: Brokers, model: str) -> None:
    async with Bus(own.nats_url, name="test") as bus:
        await declare_streams(bus, max_jobs=3)
        for _ in range(3):
            await put(bus, model, "l0")
        with pytest.raises(BusyError, match="full") as caught:
            await put(bus, model, "l1", "refused")
        assert (caught.value.code, caught.value.status) == ("queue_full", 429)
        assert caught.value.retry_after_s
        async with pulling(bus, model, 1) as puller:
            await (await take(puller)).ack()
        await eventually_queued(bus, model, 2)
        # The id that was refused is not held for a double.
        await put(bus, model, "l1", "refused")
        assert await queued(bus, model) == 3


async def eventually_queued(bus: Bus, model: str, count: int) -> None:
    async def so_many() -> bool:
        return await queued(bus, model) == count

    await eventually(so_many, f"{count} jobs are in the queue")


async def test_fc29_too_large_is_told_before_anything_is_sent(bus: Bus, model: str) -> None:
    overhead = len(encode(job(model, "x" * 16)))
    fits = bus.max_payload_bytes - overhead - 8  # a longer size takes some bytes more
    sent = bus.client.stats["out_bytes"]
    with pytest.raises(TooLargeError, match="media store") as caught:
        await put(bus, model, "l0", padding=fits + 16)
    assert (caught.value.status, caught.value.code) == (413, "message_too_large")
    assert bus.client.stats["out_bytes"] == sent
    await put(bus, model, "l0", padding=fits)
    assert await queued(bus, model) == 1
    frame = ReplyData(request_id="r", attempt=1, seq=0, data=bytes(2 << 20))
    with pytest.raises(TooLargeError):
        await bus.emit("test.nobody", frame)


# -- pulling jobs --------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3, 12])
async def test_never_more_in_work_than_slots(bus: Bus, model: str, slots: int) -> None:
    """Under load, with jobs that are there and jobs that come."""
    dice = random.Random(slots)
    total = 80
    names = {await put(bus, model, dice.choice(LANES), f"{number}") for number in range(total // 2)}
    seen: list[str] = []
    peak = 0
    running = 0

    async def work(puller: JobPuller, delivery: Delivery) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        assert running <= puller.slots
        await asyncio.sleep(dice.random() * slots / 100)  # the work
        seen.append(name_of(delivery))
        await delivery.ack()
        running -= 1
        puller.release()
        if len(seen) == total:
            puller.stop()

    async def publish() -> None:
        for number in range(total // 2, total):
            names.add(await put(bus, model, dice.choice(LANES), f"{number}"))

    async with asyncio.timeout(30), pulling(bus, model, slots) as puller:
        async with asyncio.TaskGroup() as group:
            group.create_task(publish())
            async for delivery in puller.deliveries():
                group.create_task(work(puller, delivery))
    assert Counter(seen) == Counter(names), "each once"
    assert peak == slots, "all slots are used"
    await eventually_queued(bus, model, 0)


@pytest.mark.parametrize("slots", [1, 5])
async def test_a_worker_that_is_full_holds_its_slots_and_no_more(
    bus: Bus, model: str, slots: int
) -> None:
    for lane in LANES * 3:
        await put(bus, model, lane)
    async with pulling(bus, model, slots) as puller, collecting(puller) as found:
        await eventually(lambda: len(found) == slots, "all slots are taken")
        assert puller.busy == slots
        for _ in range(20):  # round trips, in which a pull too many would be answered
            assert await delivered(bus, model) == slots
        assert len(found) == slots
        await found[0].ack()
        puller.release()
        await eventually(lambda: len(found) == slots + 1, "a free slot is filled")


@pytest.mark.parametrize("slots", [1, 2])
async def test_a_burst_does_not_overfill_an_idle_worker(
    bus: Bus, model: str, ack_wait: Callable[[float], None], slots: int
) -> None:
    """It has fewer slots than lanes, and jobs come on all lanes while it waits."""
    ack_wait(FOR_EVER_S)
    async with pulling(bus, model, slots) as puller, collecting(puller) as found:
        for _ in range(4):
            found.clear()
            await eventually(lambda: any(map(puller._is_open, puller._lanes)), "it waits")
            await asyncio.gather(*(put(bus, model, lane) for lane in LANES))
            await eventually(lambda: len(found) == slots, "its slots are filled")
            for _ in range(5):
                assert await delivered(bus, model) == slots
            for number in range(len(LANES)):
                await eventually(lambda n=number: len(found) > n, "the next one")
                await found[number].ack()
                puller.release()


async def test_the_lowest_lane_comes_first(bus: Bus, model: str) -> None:
    for lane in reversed(LANES):
        for number in range(4):
            await put(bus, model, lane, f"{lane}-{number}")
    order = []
    async with pulling(bus, model, 1) as puller:
        async for delivery in puller.deliveries():
            order.append(name_of(delivery))
            await delivery.ack()
            puller.release()
            if len(order) == 4 * len(LANES):
                puller.stop()
    assert order == [f"{lane}-{number}" for lane in LANES for number in range(4)]


@pytest.mark.parametrize("lane", ["l1", "l3", BACKGROUND_LANE])
async def test_a_job_waits_no_longer_for_its_lane_than_it_should(
    bus: Bus, model: str, lane: str
) -> None:
    """Behind the older ones of the first lane, before the younger ones."""
    order = []

    async def work(puller: JobPuller) -> None:
        async for delivery in puller.deliveries():
            order.append(name_of(delivery))
            await delivery.ack()
            puller.release()
            if len(order) == 13:
                puller.stop()

    for number in range(6):
        await put(bus, model, "l0", f"old-{number}")
    await put(bus, model, lane, "late")
    await asyncio.sleep(0.4)
    for number in range(6):
        await put(bus, model, "l0", f"new-{number}")
    async with pulling(bus, model, 1, waits_s=(0.2, 0.2, 0.2)) as puller:
        await asyncio.wait_for(work(puller), BOUND_S)
    before = order[: order.index("late")]
    assert before[:6] == [f"old-{number}" for number in range(6)]
    # One younger job tells that the lane's wait is over.
    assert len(before) in ((12,) if lane == BACKGROUND_LANE else (6, 7)), order


async def test_without_waits_the_oldest_job_comes_first(bus: Bus, model: str) -> None:
    names = []
    for number, lane in enumerate(("l3", "l1", "l2", "l0") * 6):
        names.append(await put(bus, model, lane, f"{number}"))
    order = []
    async with pulling(bus, model, 1, waits_s=(0, 0, 0)) as puller:
        for _ in names:
            delivery = await take(puller)
            order.append(names.index(name_of(delivery)))
            await delivery.ack()
            puller.release()
    assert max(abs(place - number) for place, number in enumerate(order)) <= 8, order


async def test_a_new_job_of_a_lower_lane_overtakes(bus: Bus, model: str) -> None:
    for number in range(3):
        await put(bus, model, "l3", f"late-{number}")
    async with pulling(bus, model, 1) as puller:
        first = await take(puller)
        await put(bus, model, "l0", "urgent")
        await first.ack()
        puller.release()
        assert name_of(await take(puller)) == "urgent"


async def test_long_pulls_do_not_hide_a_lane(bus: Bus, model: str) -> None:
    """The last free slot is not for the lanes alone on which pulls were left open."""
    async with pulling(bus, model, 8) as puller, collecting(puller) as found:
        await eventually(lambda: all(map(puller._is_open, puller._lanes)), "it waits on all")
        for number in range(8):
            await put(bus, model, "l0")
            took_s = await eventually(lambda n=number: len(found) > n, f"job {number} is seen")
            assert took_s < 2


@pytest.mark.parametrize("slots", [1, 2, 40])
async def test_an_idle_worker_sees_every_lane(bus: Bus, model: str, slots: int) -> None:
    """Also with fewer slots than lanes, and after it has waited for some time."""
    async with pulling(bus, model, slots) as puller:
        async with collecting(puller) as found:
            for lane in [*LANES, *reversed(LANES)]:
                before = len(found)
                name = await put(bus, model, lane)
                waited_s = await eventually(lambda n=before: len(found) > n, f"{lane} is seen")
                assert waited_s < 1.0
                assert name_of(found[-1]) == name
                await found[-1].ack()
                puller.release()


@pytest.mark.slow
async def test_the_last_lane_never_gets_all_slots(bus: Bus, model: str) -> None:
    """However many of its jobs wait, and however long those take that run."""
    async with pulling(bus, model, 8, last_lane_slots=5) as puller:
        async with collecting(puller) as found:
            for number in range(9):
                await put(bus, model, BACKGROUND_LANE, f"{number}")
            await eventually(lambda: len(found) >= 5, "its slots are taken")
            await asyncio.sleep(1.5)  # longer than any wait of the puller
            assert len(found) == 5
            for taken, lane in enumerate(("l0", "l2", "l1"), 6):
                await put(bus, model, lane, f"{lane}")
                waited_s = await eventually(lambda n=taken: len(found) == n, f"{lane} is seen")
                assert waited_s < 1.0
            for delivery in found[:4]:
                await delivery.ack()
                puller.release()
            await eventually(lambda: len(found) == 9, "four of eight are free: one more")
            await asyncio.sleep(1.5)
            assert len(found) == 9


async def test_a_server_that_is_too_old_is_named(
    bus: Bus, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "OLDEST_SERVER", (99, 0))
    with pytest.raises(UnavailableError, match=r"EPD_NATS_URL is of version 2\..*99\.0 or later"):
        await declare_consumers(bus, "encode", model)


async def test_the_least_loaded_worker_gets_a_job(bus: Bus, model: str) -> None:
    """Whoever has asked first."""
    async with pulling(bus, model, 16) as busy, pulling(bus, model, 16) as idle:
        async with collecting(busy) as first, collecting(idle) as second:
            for number in range(6):
                await put(bus, model, "l0", f"{number}")
                await eventually(
                    lambda n=number: len(first) + len(second) == n + 1, "somebody has it"
                )
            assert (len(first), len(second)) == (3, 3)
            for delivery in first:
                await delivery.ack()
                busy.release()
            await asyncio.sleep(0.6)  # its pulls say so, once they were renewed
            for number in range(6, 9):
                await put(bus, model, "l0", f"{number}")
                await eventually(
                    lambda n=number: len(first) + len(second) == n + 1, "somebody has it"
                )
            assert (len(first), len(second)) == (6, 3)


async def test_a_slow_worker_takes_little_ahead(bus: Bus, model: str) -> None:
    consumers = await declare_consumers(bus, "encode", model)
    async with JobPuller(
        bus,
        "encode",
        consumers=consumers,
        waits_s=lane_waits_s(AGED_WAITS_S),
        slots=16,
        last_lane_slots=16,
        ahead_s=0.5,
        worker="w",
    ) as puller:
        async with collecting(puller) as found:
            await put(bus, model, "l0", "first")
            await eventually(lambda: len(found) == 1, "it is taken")
            await asyncio.sleep(0.4)
            await found[0].ack()
            puller.release()
            for number in range(12):
                await put(bus, model, "l0", f"{number}")
            await eventually(lambda: len(found) >= 3, "0.4 s each, so two of them")
            await asyncio.sleep(0.15)
            assert len(found) == 3
            await found[1].ack()
            puller.release()
            await eventually(lambda: len(found) == 4, "one ends, one begins")


async def test_a_heartbeat_keeps_a_job(
    bus: Bus, model: str, ack_wait: Callable[[float], None]
) -> None:
    ack_wait(0.4)
    name = await put(bus, model, "l0")
    async with pulling(bus, model, 1) as one, pulling(bus, model, 1) as two:
        delivery = await take(one)
        async with collecting(two) as found:
            async with delivery:
                await asyncio.sleep(1.2)  # three times the ack wait: this is the test
                assert found == []
                await delivery.ack()
            await eventually_queued(bus, model, 0)
            assert found == []
    assert (name_of(delivery), delivery.attempt, delivery.last_attempt) == (name, 1, False)
    assert 0 <= delivery.queued_s < 60


async def test_a_silent_workers_job_goes_to_another(
    bus: Bus, model: str, ack_wait: Callable[[float], None]
) -> None:
    ack_wait(0.4)
    name = await put(bus, model, "l2")
    async with pulling(bus, model, 1) as one, pulling(bus, model, 1) as two:
        lost = await take(one)
        started = time.monotonic()
        again = await take(two)
        assert time.monotonic() - started < 3
        assert (name_of(again), lost.attempt, again.attempt) == (name, 1, 2)
        await again.ack()
        await eventually_queued(bus, model, 0)
        await lost.ack()  # late, and harmless


async def test_the_last_attempt_is_known(
    bus: Bus, model: str, ack_wait: Callable[[float], None]
) -> None:
    ack_wait(FOR_EVER_S)
    await put(bus, model, "l0")
    async with pulling(bus, model, 1) as puller:
        for attempt in range(1, streams.MAX_DELIVERIES + 1):
            delivery = await take(puller)
            assert delivery.attempt == attempt
            assert delivery.last_attempt == (attempt == streams.MAX_DELIVERIES)
            await delivery.retry(0.001)
            puller.release()


async def test_a_retry_comes_after_its_delay(
    bus: Bus, model: str, ack_wait: Callable[[float], None]
) -> None:
    ack_wait(FOR_EVER_S)
    name = await put(bus, model, "l0")
    async with pulling(bus, model, 1) as puller:
        delivery = await take(puller)
        await delivery.retry(0.5)
        await delivery.ack()  # settled already: the first one wins
        puller.release()
        started = time.monotonic()
        again = await take(puller)
        assert 0.4 < time.monotonic() - started < 3
        assert (name_of(again), again.attempt) == (name, 2)


async def test_giving_up_goes_to_the_dead_letters(bus: Bus, model: str) -> None:
    await put(bus, model, "l1", "bad")
    async with pulling(bus, model, 1) as puller:
        delivery = await take(puller)
        started = time.time()
        await delivery.give_up(BadRequestError("no such thing", code="the_code"))
        await delivery.give_up(BadRequestError("again"))
        await delivery.retry(0.001)
        letter = await last_letter(bus)
        await eventually_queued(bus, model, 0)
    assert letter == DeadLetter(
        stage="encode",
        subject=subjects.encode_subject(model, "l1"),
        reason="no such thing",
        code="the_code",
        worker="w",
        attempts=1,
        at=letter.at,
        payload=encode(job(model, "bad")),
    )
    assert started - 1 < letter.at < time.time() + 1


async def last_letter(bus: Bus) -> DeadLetter:
    message = await bus.js.get_last_msg("EPD_DLQ", subjects.dlq_subject("encode"))
    return decode(message.data or b"", DeadLetter)


async def test_a_letter_too_large_for_a_message_has_no_payload(bus: Bus, model: str) -> None:
    await put(bus, model, "l0", padding=bus.max_payload_bytes - 300)
    async with pulling(bus, model, 1) as puller:
        await (await take(puller)).give_up(BadRequestError("no" * 300))
    letter = await last_letter(bus)
    assert letter.subject == subjects.encode_subject(model, "l0")
    assert letter.payload == b""


async def test_giving_up_without_a_broker_keeps_the_job(
    own: Brokers, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason must be stored before the job goes (I10)."""
    monkeypatch.setattr(connection, "PUBLISH_TIMEOUT_S", 0.3)
    async with Bus(own.nats_url, name="test") as bus:
        await declare_streams(bus, max_jobs=10)
        await put(bus, model, "l0")
        async with pulling(bus, model, 1) as puller:
            delivery = await take(puller)
            await bus.js.delete_stream("EPD_DLQ")
            with pytest.raises(UnavailableError):
                await delivery.give_up(BadRequestError("no"))
        assert await queued(bus, model) == 1


async def test_stop_ends_the_iteration(bus: Bus, model: str) -> None:
    async def iterate(puller: JobPuller) -> list[Delivery]:
        return [delivery async for delivery in puller.deliveries()]

    for steps in (0, 1, 50):  # before its first step, while it looks, and while it waits
        async with pulling(bus, model, 10) as puller:
            task = asyncio.create_task(iterate(puller))
            for _ in range(steps):
                await bus.flush()
            puller.stop()
            async with asyncio.timeout(1):
                assert await task == []
    async with pulling(bus, model, 1) as puller:
        await put(bus, model, "l0")
        async with collecting(puller) as found:  # full: it waits for a slot when it is stopped
            await eventually(lambda: bool(found), "the slot is taken")


async def test_a_stop_while_pulls_are_taken_back_is_seen(
    bus: Bus, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is full takes its pulls back, which needs a round trip; a stop may fall into it."""
    async with pulling(bus, model, 1) as puller:
        withdraw = puller._withdraw

        async def withdraw_and_stop() -> None:
            await withdraw()
            if puller.busy:
                puller.stop()

        monkeypatch.setattr(puller, "_withdraw", withdraw_and_stop)
        await put(bus, model, "l0")
        async with asyncio.timeout(2):
            found = [delivery async for delivery in puller.deliveries()]
        assert len(found) == 1


async def test_what_arrives_after_stop_is_given_back(
    bus: Bus, model: str, ack_wait: Callable[[float], None]
) -> None:
    """A worker that drains still has pulls open at the server."""
    ack_wait(FOR_EVER_S)
    async with pulling(bus, model, 40) as draining:
        async with collecting(draining):
            await eventually(
                lambda: all(draining._is_open(lane) for lane in draining._lanes), "pulls are open"
            )
            await bus.flush()
        names = {await put(bus, model, lane) for lane in LANES}
        async with pulling(bus, model, 40) as other, collecting(other) as found:
            await eventually(lambda: len(found) == len(names), "another worker gets them", 5)
            assert {name_of(delivery) for delivery in found} == names


async def test_a_worker_that_drains_costs_a_job_no_attempt(bus: Bus, model: str) -> None:
    """A job has five of them, and a rolling restart may have more workers."""
    async with pulling(bus, model, 40) as draining, pulling(bus, model, 40) as other:
        async with collecting(draining):
            await eventually(
                lambda: all(draining._is_open(lane) for lane in draining._lanes), "pulls are open"
            )
            await bus.flush()
        names = {await put(bus, model, lane) for lane in LANES}
        async with collecting(other) as found:
            await eventually(lambda: len(found) == len(names), "another worker gets them")
            assert {delivery.attempt for delivery in found} == {1}


async def test_a_worker_that_steps_back_leaves_jobs_to_others(
    bus: Bus, model: str, ack_wait: Callable[[float], None]
) -> None:
    ack_wait(FOR_EVER_S)
    async with pulling(bus, model, 40) as weak, pulling(bus, model, 40) as other:
        async with collecting(weak) as none, collecting(other) as found:
            await eventually(
                lambda: all(weak._is_open(lane) for lane in weak._lanes), "pulls are open"
            )
            weak.step_back(FOR_EVER_S)
            await eventually(
                lambda: not any(weak._is_open(lane) for lane in weak._lanes), "they are taken back"
            )
            names = {await put(bus, model, lane) for lane in (*LANES, *LANES)}
            await eventually(lambda: len(found) == len(names), "the other one gets them all")
            assert none == []
            assert {delivery.attempt for delivery in found} == {1}


async def test_a_worker_that_stepped_back_comes_again(bus: Bus, model: str) -> None:
    async with pulling(bus, model, 2) as puller, collecting(puller) as found:
        await put(bus, model, "l0")
        await eventually(lambda: len(found) == 1, "it takes jobs")
        puller.step_back(0.3)
        began = time.monotonic()
        await put(bus, model, "l0")
        await eventually(lambda: len(found) == 2, "it takes jobs again")
        assert time.monotonic() - began >= 0.3


async def test_what_was_not_taken_is_given_back(
    bus: Bus, model: str, ack_wait: Callable[[float], None]
) -> None:
    ack_wait(FOR_EVER_S)
    async with pulling(bus, model, 40) as puller:
        iterator = puller.deliveries()
        first = asyncio.ensure_future(anext(iterator))
        await eventually(
            lambda: all(puller._is_open(lane) for lane in puller._lanes), "pulls are open"
        )
        names = {await put(bus, model, lane) for lane in LANES}
        async with asyncio.timeout(BOUND_S):
            taken = await first

        async def all_out() -> bool:
            return await delivered(bus, model) == len(names)

        await eventually(all_out, "the server has given all of them out")
    async with pulling(bus, model, 40) as other, collecting(other) as found:
        await eventually(lambda: len(found) == len(names) - 1, "another worker gets the rest", 5)
        assert {name_of(delivery) for delivery in found} == names - {name_of(taken)}


async def test_a_restart_of_the_broker_loses_no_job(
    own: Brokers, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PUBLISH_TIMEOUT_S", 0.5)
    total, at_first = 60, 30
    handled: Counter[str] = Counter()
    some, go_on = asyncio.Event(), asyncio.Event()

    async def publish(bus: Bus, number: int) -> None:
        for _ in range(40):
            try:
                await put(bus, model, LANES[number % 4], f"{number}")
                return
            except UnavailableError:
                await asyncio.sleep(0.05)
        raise AssertionError("the broker never came back")

    async def work(puller: JobPuller, delivery: Delivery) -> None:
        async with delivery:
            if len(handled) >= at_first // 2:
                some.set()
                await go_on.wait()  # jobs are in work, and some are queued, at the restart
            handled[name_of(delivery)] += 1
            await delivery.ack()
        puller.release()
        if len(handled) == total:
            puller.stop()

    async with (
        asyncio.timeout(30),
        Bus(own.nats_url, name="requester") as requester,
        Bus(own.nats_url, name="worker") as bus,
    ):
        await declare_streams(bus, max_jobs=1000)
        async with pulling(bus, model, 4) as puller, asyncio.TaskGroup() as group:

            async def pull() -> None:
                async for delivery in puller.deliveries():
                    group.create_task(work(puller, delivery))

            group.create_task(pull())
            for number in range(at_first):
                await publish(requester, number)
            await some.wait()
            restart = group.create_task(own.nats.restart())
            for number in range(at_first, total - 1):
                await publish(requester, number)
            await restart
            go_on.set()
            started = time.monotonic()
            await publish(requester, total - 1)
        # The slowest allowed: the ack wait of a job whose ack was lost, twice.
        assert time.monotonic() - started < 8
        await eventually_queued(requester, model, 0)
    assert set(handled) == {str(number) for number in range(total)}


async def test_an_idle_worker_sees_jobs_soon_after_a_restart(own: Brokers, model: str) -> None:
    """The server has forgotten the pulls that it did not answer."""
    async with Bus(own.nats_url, name="worker") as bus:
        await declare_streams(bus, max_jobs=10)
        async with pulling(bus, model, 40) as puller, collecting(puller) as found:
            await eventually(
                lambda: all(puller._is_open(lane) for lane in puller._lanes), "pulls are open"
            )
            await own.nats.kill()  # so that it answers no pull on its way
            await own.nats.start()
            await eventually(lambda: bus.reconnects == 1, "reconnected")
            await put(bus, model, "l3")
            assert await eventually(lambda: bool(found), "the job is seen") < 3


# -- the registry --------------------------------------------------------------------------------


def record(model: str, worker: str, beat: int, **fields: Any) -> WorkerRecord:
    given = {"role": "pd", "node": "n", "state": "ready", "ttl_s": 30.0} | fields
    return WorkerRecord(worker=worker, beat=beat, model=model, **given)


def snapshot(model: str, worker: str, **fields: Any) -> Callable[[int], WorkerRecord]:
    return lambda beat: record(model, worker, beat, **fields)


async def test_records_appear_and_go(bus: Bus, model: str) -> None:
    worker = secrets.token_hex(4)
    async with Registry(bus) as early:
        assert early.workers(model=model) == []
        async with (
            announce(bus, snapshot(model, worker), every_s=30),
            announce(bus, snapshot(model, worker, role="encoder", state="starting"), every_s=30),
        ):
            await eventually(lambda: len(early.workers(model=model)) == 2, "both are seen")
            async with Registry(bus) as late:  # has read all that is there when it is open
                for registry in (early, late):
                    (pd,) = registry.workers("pd", model)
                    assert pd.ready and pd.record == record(model, worker, 0)
                    (encoder,) = registry.workers("encoder", model)
                    assert encoder.alive and not encoder.ready
                    assert registry.ready("pd", model) == [pd.record]
                    assert registry.ready("encoder", model) == []
                    assert model in registry.models()
        await eventually(lambda: not early.workers(model=model), "both are gone")
        assert model not in early.models()


async def test_a_change_of_state_is_seen_at_once(bus: Bus, model: str) -> None:
    state = "starting"
    async with Registry(bus) as registry:
        async with announce(
            bus, lambda beat: record(model, "w1", beat, state=state), every_s=30
        ) as beat_now:
            await eventually(lambda: bool(registry.workers(model=model)), "it is seen")
            assert registry.ready("pd", model) == []
            state = "ready"
            beat_now()
            assert await eventually(lambda: bool(registry.ready("pd", model)), "ready") < 2


async def test_fc21_missed_heartbeats_mean_dead(bus: Bus, model: str) -> None:
    bucket = await bus.js.key_value(subjects.WORKERS_BUCKET)
    async with Registry(bus) as registry:
        async with announce(bus, snapshot(model, "lives", ttl_s=0.4), every_s=0.1):
            silent = "silent-" + secrets.token_hex(4)
            await bucket.put(f"pd.{silent}", encode(record(model, silent, 0, ttl_s=0.4)))
            await eventually(lambda: len(registry.ready("pd", model)) == 2, "both live")
            await eventually(lambda: len(registry.ready("pd", model)) == 1, "one is dead")
            assert [found.worker for found in registry.ready("pd", model)] == ["lives"]
            assert len(registry.workers("pd", model)) == 2, "it is known, and dead"
            beat = registry.ready("pd", model)[0].beat
            await eventually(
                lambda: registry.ready("pd", model)[0].beat > beat + 5, "it goes on living"
            )


async def test_an_unreadable_record_disturbs_nobody(bus: Bus, model: str) -> None:
    bucket = await bus.js.key_value(subjects.WORKERS_BUCKET)
    async with Registry(bus) as registry:
        junk = f"pd.junk-{secrets.token_hex(4)}"
        await bucket.put(junk, b"junk")
        async with announce(bus, snapshot(model, "w1"), every_s=30):
            await eventually(lambda: bool(registry.ready("pd", model)), "the next one is read")
        await bucket.delete(junk)


async def test_a_record_under_another_name_or_role_is_ignored(bus: Bus, model: str) -> None:
    """The rights of a role end at the record's key; what it says inside could be anything."""
    bucket = await bus.js.key_value(subjects.WORKERS_BUCKET)
    keys = [f"encoder.forged-{secrets.token_hex(4)}", f"pd.other-{secrets.token_hex(4)}"]
    async with Registry(bus) as registry:
        for key in keys:
            await bucket.put(key, encode(record(model, "w0", 0, ttl_s=1e308)))
        async with announce(bus, snapshot(model, "w1"), every_s=30):
            await eventually(lambda: bool(registry.ready("pd", model)), "the next one is read")
            assert [found.worker for found in registry.ready("pd", model)] == ["w1"]
        for key in keys:
            await bucket.delete(key)


def test_no_record_lives_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    view = WorkerView(record("m", "w", 0, ttl_s=1e308))
    assert view.alive
    now = time.monotonic()
    monkeypatch.setattr("epd_common.bus.registry.time.monotonic", lambda: now + 201.0)
    assert not view.alive


@pytest.mark.slow
async def test_the_registry_outlives_a_restart_of_the_broker(own: Brokers, model: str) -> None:
    async with Bus(own.nats_url, name="worker") as worker, Bus(own.nats_url, name="gate") as gate:
        await declare_streams(worker, max_jobs=10)
        bucket = await worker.js.key_value(subjects.WORKERS_BUCKET)
        await bucket.put("pd.dead", encode(record(model, "dead", 3, ttl_s=2.0)))
        async with (
            Registry(gate) as registry,
            announce(worker, snapshot(model, "lives"), every_s=0.1),
        ):

            def view(name: str) -> WorkerView:
                return next(v for v in registry.workers() if v.record.worker == name)

            await eventually(lambda: not view("dead").alive, "one is dead")
            await own.nats.restart()
            beat = view("lives").record.beat
            took_s = await eventually(lambda: view("lives").record.beat > beat, "the beats go on")
            assert took_s < 5
            assert view("lives").alive
            assert not view("dead").alive, "read again is not beaten again"


async def test_a_registry_before_anything_is_declared(own: Brokers, model: str) -> None:
    async with Bus(own.nats_url, name="gate") as bus, Registry(bus) as registry:
        assert registry.workers() == []
        await declare_streams(bus, max_jobs=10)
        async with announce(bus, snapshot(model, "w1"), every_s=30):
            await eventually(lambda: bool(registry.ready("pd", model)), "it is seen")


async def test_closing_while_records_arrive_ends(bus: Bus, model: str) -> None:
    """Python 3.11 loses a cancel that falls together with an arrival; closing must end all the same."""
    async with asyncio.timeout(20):
        for _ in range(30):
            async with Registry(bus), announce(bus, snapshot(model, "w"), every_s=0.001) as now:
                now()
                await asyncio.sleep(0)


# -- the micro service ---------------------------------------------------------------------------


async def test_the_micro_service_answers(bus: Bus, nats_url: str) -> None:
    role, worker = f"test{secrets.token_hex(4)}", secrets.token_hex(4)
    calls = itertools.count(1)

    async def ask(verb: str) -> dict[str, Any]:
        reply = await bus.client.request(f"$SRV.{verb}.epd-{role}", b"", timeout=5)
        answer: dict[str, Any] = json.loads(reply.data)
        return answer

    async with Bus(nats_url, name="worker") as other:
        async with micro_service(
            other,
            role=role,
            worker=worker,
            health=lambda: {"ok": True, "call": next(calls)},
            audit=lambda: {"jobs": {}},
        ):
            await other.flush()
            assert (await ask("PING"))["name"] == f"epd-{role}"
            info = await ask("INFO")
            assert info["metadata"]["worker"] == worker
            assert [end["subject"] for end in info["endpoints"]] == [f"epd.v1.health.{worker}"]
            assert await ask_health(bus, worker) == {"ok": True, "call": 1}
            assert await ask_health(bus, worker) == {"ok": True, "call": 2}
            accounts = await ask_health(bus, worker, AUDIT)
            assert accounts == {"ok": True, "call": 3, "audit": {"jobs": {}}}
            stats = await ask("STATS")
            assert stats["endpoints"][0]["num_requests"] == 3
            assert stats["endpoints"][0]["num_errors"] == 0
        await other.flush()
        with pytest.raises(nats.errors.NoRespondersError):
            await ask("PING")
        with pytest.raises(TimeoutError, match="nobody answers"):
            await ask_health(bus, worker)


async def test_waiting_until_a_model_is_served(bus: Bus, model: str) -> None:
    """A record that comes after the first reading is waited for, for a bounded time."""
    async with asyncio.timeout(10), Registry(bus) as registry:
        others = set(registry.models())
        registry.models = lambda: [m for m in Registry.models(registry) if m not in others]  # type: ignore[method-assign]
        started = time.monotonic()
        await registry.until_served(0.2)
        assert time.monotonic() - started >= 0.2
        waiting = asyncio.create_task(registry.until_served(60))
        await asyncio.sleep(0)
        assert not waiting.done()
        beat = WorkerRecord(
            role="pd", worker=secrets.token_hex(4), node="n", state="ready", beat=0, model=model
        )
        async with announce(bus, lambda number: beat, every_s=1):
            await waiting
            assert registry.models() == [model]


async def test_a_handler_that_fails_where_messages_are_read_costs_that_message(
    nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    def hear(subject: str, data: bytes) -> None:
        if data == b"bad":
            raise ValueError("no")
        heard.put_nowait(data)

    async with Bus(nats_url, name="hears") as bus:
        subject = f"test.{secrets.token_hex(4)}"
        async with bus.hearing(subject, hear):
            for data in (b"one", b"bad", b"two"):
                await bus.emit_bytes(subject, data)
            async with asyncio.timeout(10):
                assert [await heard.get(), await heard.get()] == [b"one", b"two"]
        assert "could not be handled" in caplog.text
        await bus.emit_bytes(subject, b"late")
        await bus.flush()
        assert heard.empty()
