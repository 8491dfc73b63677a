"""What the bus does when a server, or what a server kept, is lost: policy and single parts, on one server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
import pytest

from epd_cli.brokers import Brokers, embedded_brokers
from epd_common.bus import (
    Bus,
    JobPuller,
    Registry,
    announce,
    declare_consumers,
    declare_streams,
    streams,
)
from epd_common.bus import puller as puller_module
from epd_common.bus.connection import no_leader
from epd_common.errors import UnavailableError
from epd_common.login import nats_servers
from epd_common.protocol import EncodeJob, Media, WorkerRecord, encode, subjects
from epd_common.protocol.lanes import AGED_WAITS_S, lane_waits_s
from epd_common.settings import CommonSettings, SettingsError, load_settings
from service_stack import eventually

BOUND_S = 10.0


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[Brokers]:
    async with embedded_brokers(tmp_path / "own", redis=False) as running:
        yield running


def test_several_urls() -> None:
    one = "nats://u:a,b@one:4222"
    assert nats_servers(f"{one}, tls://two:1") == [one, "tls://two:1"], (
        "a password may hold a comma"
    )
    with pytest.raises(ValueError, match="URL 2 of 2"):
        nats_servers("nats://one:4222,nats://two:port")
    assert nats_servers("one:4222") == ["nats://one:4222"]
    assert Bus("one", name="").address == "one:4222"
    with pytest.raises(ValueError, match=r"is not nats://HOST:PORT or tls://HOST:PORT"):
        nats_servers("http://one:8000")
    with pytest.raises(SettingsError, match=r"^EPD_NATS_URL: URL 1 of 1") as caught:
        load_settings(CommonSettings, nats_url="nats://u:secret@one:4222,two:4222")
    assert "secret" not in str(caught.value)


def test_what_a_cluster_without_leader_says() -> None:
    assert no_leader(nats.js.errors.NoStreamResponseError())
    assert no_leader(nats.js.errors.ServiceUnavailableError(code=503))
    assert no_leader(nats.js.errors.BadRequestError(code=400, err_code=10005))
    assert not no_leader(nats.js.errors.BadRequestError(code=400, err_code=10058))


async def test_what_nobody_can_decide_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LEADER_AGAIN_S", 0.0)
    answers: list[Exception | str] = [nats.errors.NoRespondersError(), TimeoutError(), "led"]

    async def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await streams.once_led(ask) == "led"
    answers[:] = [nats.js.errors.NotFoundError(code=404), "never asked"]
    with pytest.raises(nats.js.errors.NotFoundError):
        await streams.once_led(ask)
    answers[:] = [nats.js.errors.NotFoundError(code=404), "there"]
    assert await streams.once_led(ask, exists=True) == "there", "made by another a moment ago"
    monkeypatch.setattr(streams, "LEADER_WITHIN_S", 0.0)
    answers[:] = [nats.errors.NoRespondersError()]
    with pytest.raises(UnavailableError, match="JetStream does not answer"):
        await streams.once_led(ask)


async def test_more_replicas_than_servers_are_refused_with_the_variable(own: Brokers) -> None:
    async with Bus(own.nats_url, name="test") as bus:
        with pytest.raises(UnavailableError, match="EPD_NATS_REPLICAS"):
            await declare_streams(bus, max_jobs=10, replicas=3)


async def test_one_of_the_servers_that_are_named_is_enough(own: Brokers) -> None:
    same_login = own.nats_url.rpartition(":")[0] + ":1"
    for nowhere in (same_login, "nats://epd:x@127.0.0.1:1", "nats://127.0.0.1:1"):
        async with Bus(f"{nowhere},{own.nats_url}", name="test") as bus:
            await bus.flush()
            assert bus.address.startswith("127.0.0.1:1, 127.0.0.1:")


async def test_a_mark_that_was_lost_with_its_connection_is_sent_again(
    own: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bus(own.nats_url, name="test") as bus:
        publish = bus.client.publish
        lost: list[str] = []

        async def lossy(subject: str, *given: Any, **options: Any) -> None:
            if lost:
                return await publish(subject, *given, **options)
            lost.append(subject)
            await bus.client.force_reconnect()

        monkeypatch.setattr(bus.client, "publish", lossy)
        async with asyncio.timeout(BOUND_S):
            await bus.flush()
        assert lost and bus.reconnects == 1


async def test_a_lane_without_a_leader_holds_up_no_other(
    own: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller_module, "BACKOFF_S", 10 * BOUND_S)
    model = f"m-{secrets.token_hex(4)}"
    async with Bus(own.nats_url, name="test") as bus:
        await declare_streams(bus, max_jobs=100)
        consumers = await declare_consumers(bus, "encode", model)
        await bus.js.delete_consumer(subjects.ENCODE_STREAM, consumers[0])  # answers as one unled
        for number in range(3):
            job = EncodeJob(
                key=str(number), epoch=1, model=model, fingerprint="f", media=Media(inline=b"")
            )
            subject = subjects.encode_subject(model, "l3")
            await bus.store(subject, job, message_id=f"{model}-{number}")
        async with JobPuller(
            bus,
            "encode",
            consumers=consumers,
            waits_s=lane_waits_s(AGED_WAITS_S),
            slots=8,
            last_lane_slots=8,
            worker="w",
        ) as puller:
            taken = 0
            async with asyncio.timeout(BOUND_S):
                async for delivery in puller.deliveries():
                    await delivery.ack()
                    puller.release()
                    taken += 1
                    if taken == 3:
                        puller.stop()


def record(worker: str, number: int) -> WorkerRecord:
    return WorkerRecord(
        role="pd", worker=worker, node="n", state="ready", beat=number, ttl_s=1.0, model=worker
    )


async def test_a_watch_that_its_server_lost_is_made_anew(own: Brokers) -> None:
    """The server forgets it without a word, as when another server of a cluster kept it and is gone."""
    async with Bus(own.nats_url, name="test") as bus:
        await declare_streams(bus, max_jobs=10)
        bucket = f"KV_{subjects.WORKERS_BUCKET}"
        async with (
            announce(bus, lambda number: record("a", number), every_s=0.3),
            Registry(bus) as registry,
        ):
            await eventually(lambda: registry.models() == ["a"], "the worker is seen")
            for consumer in await bus.js.consumers_info(bucket):
                await bus.js.delete_consumer(bucket, consumer.name)
            async with announce(bus, lambda number: record("b", number), every_s=0.3):
                await eventually(lambda: registry.models() == ["a", "b"], "the other one, too")


@pytest.mark.slow
async def test_silence_of_all_is_the_buckets_and_that_of_one_is_its_own(own: Brokers) -> None:
    async with Bus(own.nats_url, name="test") as bus:
        await declare_streams(bus, max_jobs=10)
        bucket = await bus.js.key_value(subjects.WORKERS_BUCKET)
        key = subjects.worker_key("pd", "a")
        await bucket.put(key, encode(record("a", 1)))
        async with Registry(bus) as registry:
            await eventually(lambda: registry.models() == ["a"], "the worker is seen")
            await asyncio.sleep(1.5)  # longer than its time to live
            assert registry.models() == ["a"], "nobody beats, so nobody is held for dead"
            async with announce(bus, lambda number: record("b", number), every_s=0.3):
                await eventually(lambda: registry.models() == ["b"], "others beat, and it does not")
