"""What NATS and Valkey take for one of each: the unit costs of docs/scaling.md.

    python -m bench.broker_units

CPU seconds of the brokers' own processes, so that the clients beside them do not count. Takes ten seconds;
wants a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop
from nats.aio.msg import Msg

from epd_bench.processes import cpu_seconds
from epd_bench.result import this_machine
from epd_cli.brokers import Brokers, embedded_brokers
from epd_common.bus import Bus
from epd_common.bus.registry import Registry
from epd_common.bus.streams import (
    LOAD_GROUP,
    STREAMS,
    declare_consumers,
    declare_streams,
)
from epd_common.protocol import WorkerRecord, encode, subjects
from epd_common.protocol.lanes import encode_lane
from epd_common.store.redis_client import open_redis

MODEL = "units"
PULLS, JOBS, EVENTS, SUBSCRIBERS, VALUES = 20_000, 5_000, 400, 250, 200
VALUE_BYTES = 8 << 20
WORKERS = 5_000
_AT_ONCE = 200
WITHIN_S = 120.0
"""An answer that was lost ends the run."""


async def nats_cpu_s(brokers: Brokers, work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """CPU and wall seconds of NATS while something is done."""
    pids = {"nats": [brokers.nats.pid]}
    before, began = cpu_seconds(pids)["nats"], time.monotonic()
    async with asyncio.timeout(WITHIN_S):
        await work()
    return cpu_seconds(pids)["nats"] - before, time.monotonic() - began


async def run() -> int:
    print(this_machine().processor)
    with tempfile.TemporaryDirectory(prefix="epd-units-") as folder:
        async with (
            embedded_brokers(Path(folder)) as brokers,
            Bus(brokers.nats_url, name="units") as bus,
        ):
            await declare_streams(bus, max_jobs=100_000, replicas=1)
            await _pulls(brokers, bus)
            await _jobs(brokers, bus)
            await _deliveries(brokers, bus)
            await _valkey(brokers)
            _records(bus)
    return 0


async def _pulls(brokers: Brokers, bus: Bus) -> None:
    """Pulls that are told that there is nothing."""
    consumer = (await declare_consumers(bus, "encode", MODEL))[0]
    subject = f"$JS.API.CONSUMER.MSG.NEXT.{STREAMS['encode']}.{consumer}"
    body = b'{"batch":1,"expires":100000000,"group":"%s","priority":1}' % LOAD_GROUP.encode()
    answered = asyncio.Semaphore(0)

    async def on_message(message: Msg) -> None:
        answered.release()

    inbox = bus.client.new_inbox()
    subscription = await bus.subscribe(inbox, on_message)

    async def work() -> None:
        for _ in range(PULLS // _AT_ONCE):
            for _ in range(_AT_ONCE):
                await bus.emit_bytes(subject, body, reply=inbox)
            for _ in range(_AT_ONCE):
                await answered.acquire()

    cpu_s, _ = await nats_cpu_s(brokers, work)
    print(f"a pull that expires: {cpu_s / PULLS * 1e6:.1f} us of NATS")
    await subscription.unsubscribe()


async def _jobs(brokers: Brokers, bus: Bus) -> None:
    """Jobs that are published, pulled and acknowledged."""
    lane = encode_lane(0)
    subject = subjects.encode_subject(MODEL, lane)
    consumer = subjects.encode_consumer(MODEL, lane)
    pull = f"$JS.API.CONSUMER.MSG.NEXT.{STREAMS['encode']}.{consumer}"
    body = b'{"batch":1,"expires":5000000000,"group":"%s","priority":1}' % LOAD_GROUP.encode()
    done = asyncio.Semaphore(0)

    async def on_message(message: Msg) -> None:
        await message.ack()
        done.release()

    inbox = bus.client.new_inbox()
    subscription = await bus.subscribe(inbox, on_message)
    data = b"x" * 600

    async def work() -> None:
        for _ in range(JOBS // _AT_ONCE):
            for _ in range(_AT_ONCE):
                await bus.emit_bytes(pull, body, reply=inbox)
            await asyncio.gather(*(bus.js.publish(subject, data) for _ in range(_AT_ONCE)))
            for _ in range(_AT_ONCE):
                await done.acquire()

    cpu_s, wall_s = await nats_cpu_s(brokers, work)
    print(
        f"a job (published, pulled, acknowledged): {cpu_s / JOBS * 1e6:.1f} us of NATS; "
        f"one client does {JOBS / wall_s:,.0f}/s"
    )
    await subscription.unsubscribe()


async def _deliveries(brokers: Brokers, bus: Bus) -> None:
    """Core messages to many subscribers."""
    got = asyncio.Semaphore(0)

    async def on_message(message: Msg) -> None:
        got.release()

    subject = "units.told"
    subscriptions = [await bus.subscribe(subject, on_message) for _ in range(SUBSCRIBERS)]
    await bus.flush()
    data = b"x" * 700  # a worker's record

    async def work() -> None:
        for _ in range(EVENTS):
            await bus.emit_bytes(subject, data)
            for _ in range(SUBSCRIBERS):
                await got.acquire()

    cpu_s, _ = await nats_cpu_s(brokers, work)
    print(f"a delivery to one of many: {cpu_s / EVENTS / SUBSCRIBERS * 1e6:.2f} us of NATS")
    for subscription in subscriptions:
        await subscription.unsubscribe()


async def _valkey(brokers: Brokers) -> None:
    """Large values, in and out."""
    value = b"x" * VALUE_BYTES
    pids = {"valkey": [brokers.redis.pid]}
    async with open_redis(brokers.redis_url) as redis:
        before, began = cpu_seconds(pids)["valkey"], time.monotonic()
        for _ in range(VALUES):
            await redis.set("units", value)
            await redis.get("units")
        cpu_s, wall_s = cpu_seconds(pids)["valkey"] - before, time.monotonic() - began
        moved = 2 * VALUES * VALUE_BYTES
        print(
            f"values of {VALUE_BYTES >> 20} MiB: {moved / cpu_s / 1e9:.2f} GB/s of Valkey's CPU, "
            f"{moved / wall_s / 1e9:.2f} GB/s with one client"
        )


def _records(bus: Bus) -> None:
    """A worker's record at who watches all of them."""
    for workers in (100, WORKERS):
        registry: Any = Registry(bus)
        names = [f"w{number}" for number in range(workers)]
        for beat in range(2):
            began = time.process_time()
            for name in names:
                record = WorkerRecord(
                    role="pd", worker=name, node="n", state="ready", model=MODEL, beat=beat
                )
                registry._note(subjects.worker_key("pd", name), encode(record))
            each_s = (time.process_time() - began) / workers
        print(f"a record at a watcher of {workers} workers: {each_s * 1e6:.0f} us")


if __name__ == "__main__":
    sys.exit(uvloop.run(run()))
