"""Three NATS servers of which one is lost: requests end, and everything goes on without a hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from bench.nats_cluster import NatsCluster, nats_cluster
from epd_cli.brokers import Brokers
from epd_common.bus import Bus, Registry, announce, declare_streams
from epd_common.protocol import Cancel, WorkerRecord, subjects
from epd_sim.answers import expected_answer
from service_stack import CHAT, eventually, picture, text_of
from sim_stack import SimStack, sim_stack

RECOVERY_S = 30.0
"""Servers choose a leader within 9 s; this machine may have other things to do."""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[NatsCluster]:
    async with nats_cluster(tmp_path / "nats") as running:
        yield running


@pytest.mark.slow
async def test_a_stored_message_outlives_the_leader_and_is_one(cluster: NatsCluster) -> None:
    async with (
        Bus(cluster.url_for("gateway"), name="one", inbox="_INBOX_gateway") as bus,
        Bus(cluster.url, name="two") as other,
    ):
        for replicas in (1, 3):  # a setting that changes is an update, of the bucket too
            await declare_streams(bus, max_jobs=100, replicas=replicas)
            for info in await other.js.streams_info():
                assert info.config.num_replicas == replicas, info.config.name
        leader = await cluster.leader_of(other, subjects.GENERATE_STREAM)
        subject = subjects.generate_subject("cluster", "l0")
        await bus.store(subject, Cancel(request_id="before"), message_id="before")
        async with Bus(leader.url, name="knows one") as knows_one:
            await leader.kill()
            async with asyncio.timeout(RECOVERY_S):
                await knows_one.flush()  # by another server, of which the first told it
        for message_id in ("before", "after", "after"):  # its acknowledgement may have been lost
            await bus.store(subject, Cancel(request_id=message_id), message_id=message_id)
        await bus.flush()
        info = await other.js.stream_info(subjects.GENERATE_STREAM)
        assert info.state.messages == 2
        await leader.start()

        async def caught_up() -> bool:
            lag = await cluster.lag_of(other, subjects.GENERATE_STREAM)
            return len(lag) == 2 and not any(lag.values())

        await eventually(caught_up, "the server that was killed has all again", RECOVERY_S)


@pytest.mark.slow
async def test_the_registry_outlives_the_server_that_kept_its_watch(cluster: NatsCluster) -> None:
    """Nobody is held for dead while the bucket has no leader, and the dead are found again afterwards."""
    record = WorkerRecord(
        role="pd", worker="w", node="n", state="ready", beat=0, ttl_s=1.0, model="m"
    )

    def beat(number: int) -> WorkerRecord:
        return WorkerRecord(
            **{name: getattr(record, name) for name in record.__struct_fields__ if name != "beat"},
            beat=number,
        )

    async with Bus(cluster.url, name="worker") as bus, Bus(cluster.url, name="reader") as reader:
        await declare_streams(bus, max_jobs=100, replicas=3)
        async with Registry(reader) as registry:
            async with announce(bus, beat, every_s=0.3):
                await eventually(lambda: registry.models() == ["m"], "the worker is seen")
                for victim in cluster.nodes:  # whoever leads the bucket, or keeps the watch
                    await victim.kill()
                    began = time.monotonic()
                    (view,) = registry.workers()
                    seen = view.seen

                    def seen_again(seen: float = seen, began: float = began) -> bool:
                        assert registry.models() == ["m"]
                        (view,) = registry.workers()
                        return view.seen > max(seen, began + 0.5)

                    await eventually(seen_again, f"beats pass without {victim.name}", RECOVERY_S)
                    await victim.start()
                    await eventually(cluster_whole(cluster, bus), "the server is back", RECOVERY_S)
            await eventually(lambda: not registry.models(), "the worker is gone", RECOVERY_S)


def cluster_whole(cluster: NatsCluster, bus: Bus):  # type: ignore[no-untyped-def]
    """Whether each server has all of the registry's bucket."""

    async def check() -> bool:
        lag = await cluster.lag_of(bus, f"KV_{subjects.WORKERS_BUCKET}")
        return len(lag) == 2 and not any(lag.values())

    return check


@pytest.mark.slow
async def test_the_leader_of_the_jobs_is_killed_while_requests_run(
    cluster: NatsCluster, brokers: Brokers, tmp_path: Path
) -> None:
    async with sim_stack(cluster.url, brokers.redis_url, tmp_path) as stack:
        stack.settings |= {"nats_replicas": 3}
        await stack.add_encoder()
        await stack.add_encoder()
        await stack.add_pd()
        await stack.add_pd()
        await stack.add_gateway(nats_replicas=3)
        await stack.ready()

        async def caught_up() -> bool:
            lag = await cluster.lag_of(stack.bus, subjects.GENERATE_STREAM)
            return len(lag) == 2 and not any(lag.values())

        async def answers() -> bool:
            return await ask(stack, 100, begun) == "answered"

        consumer = subjects.generate_consumer(stack.model, "l0")
        for victim in (
            lambda: cluster.leader_of(stack.bus, subjects.GENERATE_STREAM),
            lambda: cluster.leader_of_consumer(stack.bus, subjects.GENERATE_STREAM, consumer),
        ):
            begun = asyncio.Event()
            requests = [asyncio.create_task(ask(stack, n, begun)) for n in range(40)]
            await begun.wait()
            killed = await victim()
            await killed.kill()
            outcomes = await asyncio.gather(*requests)
            assert len(outcomes) == 40
            assert "answered" in outcomes
            await eventually(answers, "requests are answered without that server", RECOVERY_S)
            await killed.start()
            await eventually(caught_up, "the server has all again", RECOVERY_S)
            assert await ask(stack, 101, begun) == "answered"

        async def empty() -> bool:
            streams = (subjects.GENERATE_STREAM, subjects.ENCODE_STREAM)
            infos = [await stack.bus.js.stream_info(stream) for stream in streams]
            return not any(info.state.messages for info in infos)

        await eventually(empty, "no job is left", RECOVERY_S)


async def ask(stack: SimStack, number: int, begun: asyncio.Event) -> str:
    """Send a request at its time; it must end in the right answer or an error that says what happened."""
    await asyncio.sleep(0.1 * number if number < 100 else 0)
    if number == 5:
        begun.set()
    pictures = [picture() for _ in range(number % 3)]
    body = stack.body(f"request {number}", *pictures, max_tokens=20)
    response = await stack.http.post(CHAT, json=body, timeout=RECOVERY_S)
    if response.status_code == httpx.codes.OK:
        assert text_of(response) == expected_answer(body, pictures)
        return "answered"
    error = response.json()["error"]
    assert response.status_code in (502, 503, 504), error
    assert error["code"] and error["message"]
    return str(error["code"])
