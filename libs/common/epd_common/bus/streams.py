"""Streams, consumers and buckets, declared explicitly and idempotently.

``pull_subscribe`` on an existing durable ignores a new configuration silently, so nothing here relies
on it: whoever starts declares what it needs, and a changed setting is an update.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    KeyValueConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import APIError, NotFoundError

from epd_common.bus.connection import Bus, no_leader
from epd_common.errors import UnavailableError
from epd_common.protocol import subjects
from epd_common.protocol.subjects import Stage

ACK_WAIT_S = 2.0
"""A job whose worker is silent for this long is given to another; workers send ``in_progress``."""

MAX_DELIVERIES = 5
JOB_MAX_AGE_S = 3600.0
"""No job is worth doing after this; what nobody takes does not fill a queue for ever."""

DUPLICATE_WINDOW_S = 120.0
MAX_CONSUMERS = 100_000
"""Of a queue: ten for each model, and one for each PD worker. A stream that names no bound has 1,000, by the
default of NATS 2.15."""

DLQ_MAX_MESSAGES = 10_000
DLQ_MAX_AGE_S = 7 * 24 * 3600.0
_NAME_IN_USE = 10058  # JetStream's error codes
_GONE = (10037, 10043, 10057)
"""JetStream says one of these of a message that is not there, by where in the stream it was."""

WORKERS_TTL_S = 60.0
"""A record nobody renews leaves the bucket after this; readers go by the heartbeat, sooner."""

LEADER_WITHIN_S, LEADER_AGAIN_S = 30.0, 0.25
"""A cluster that has just begun, or lost a server, gets so long to choose its leaders."""

T = TypeVar("T")

STREAMS: dict[Stage, str] = {
    "encode": subjects.ENCODE_STREAM,
    "generate": subjects.GENERATE_STREAM,
}

ADVISORY_SUBJECTS: dict[Stage, str] = {
    stage: f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{stream}.>"
    for stage, stream in STREAMS.items()
}
"""Where the server says that it delivers a job of a stage no more."""


async def once_led(ask: Callable[[], Awaitable[T]], *, exists: bool = False) -> T:
    """Ask JetStream for something, again where nobody can decide it yet.

    Args:
        exists: What is asked about was made by somebody, if only a moment ago: not every server of a cluster
            knows it at once.

    Raises:
        UnavailableError: still nobody can after ``LEADER_WITHIN_S``.
    """
    give_up = time.monotonic() + LEADER_WITHIN_S
    while True:
        try:
            return await ask()
        except (nats.errors.Error, TimeoutError) as error:
            if not (no_leader(error) or (exists and isinstance(error, NotFoundError))):
                raise
            if time.monotonic() >= give_up:
                raise UnavailableError(
                    f"JetStream does not answer ({error or type(error).__name__}): has each NATS server "
                    "`jetstream` in its configuration, and do more than half of the cluster's run?",
                    code="nats_unavailable",
                    retry_after_s=1.0,
                ) from error
        await asyncio.sleep(LEADER_AGAIN_S)


async def declare_streams(
    bus: Bus, *, max_jobs: int, replicas: int = 1, update: bool = True
) -> None:
    """Create the work queues, the dead-letter stream and the registry bucket, where they are missing.

    Args:
        update: Also give them these settings where they have others. That right is the gateway's: who has it
            could have jobs sent elsewhere, or thrown away.

    Raises:
        UnavailableError: the server does not make them like this, or nobody can decide it.
    """
    try:
        await _declare_streams(bus, max_jobs=max_jobs, replicas=replicas, update=update)
    except APIError as error:
        raise UnavailableError(
            f"JetStream refuses a stream or bucket ({error.description}); are EPD_NATS_REPLICAS={replicas} "
            "and the servers' limits right?",
            code="nats_unavailable",
        ) from error


async def _declare_streams(bus: Bus, *, max_jobs: int, replicas: int, update: bool) -> None:
    for stage, stream in STREAMS.items():
        await _declare_stream(
            bus.js,
            StreamConfig(
                name=stream,
                subjects=[f"epd.v1.{stage}.>"],
                retention=RetentionPolicy.WORK_QUEUE,
                storage=StorageType.FILE,
                discard=DiscardPolicy.NEW,  # a full queue refuses: that is the back-pressure
                max_msgs=max_jobs,
                max_age=JOB_MAX_AGE_S,
                max_consumers=MAX_CONSUMERS,
                duplicate_window=DUPLICATE_WINDOW_S,
                num_replicas=replicas,
            ),
            update=update,
        )
    await _declare_stream(
        bus.js,
        StreamConfig(
            name=subjects.DLQ_STREAM,
            subjects=["epd.v1.dlq.>"],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            max_msgs=DLQ_MAX_MESSAGES,
            max_age=DLQ_MAX_AGE_S,
            num_replicas=replicas,
        ),
        update=update,
    )
    await _declare_stream(
        bus.js,
        StreamConfig(
            name=subjects.EXHAUSTED_STREAM,
            subjects=list(ADVISORY_SUBJECTS.values()),
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            max_msgs=max_jobs,
            max_age=JOB_MAX_AGE_S,
            num_replicas=replicas,
        ),
        update=update,
    )
    registry = KeyValueConfig(
        bucket=subjects.WORKERS_BUCKET, history=1, ttl=WORKERS_TTL_S, replicas=replicas
    )
    with _unless_there():
        await once_led(lambda: bus.js.create_key_value(registry))
    bucket = f"KV_{subjects.WORKERS_BUCKET}"
    info = await once_led(lambda: bus.js.stream_info(bucket), exists=True)
    if update and info.config.num_replicas != replicas:
        info.config.num_replicas = replicas
        await once_led(lambda: bus.js.update_stream(info.config))


LOAD_GROUP = "load"
"""The one group of pulls of a lane's consumer; in it those of the least loaded worker are answered first."""


@dataclass
class _LaneConsumer(ConsumerConfig):  # type: ignore[misc]  # the client has no types
    """With what the client's own class does not know yet."""

    priority_groups: list[str] = field(default_factory=lambda: [LOAD_GROUP])
    priority_policy: str = "prioritized"


OLDEST_SERVER = (2, 12)
"""The first NATS whose consumers know priorities of pulls."""


async def declare_consumers(
    bus: Bus, stage: Stage, model: str, place: str = subjects.ANY_PLACE
) -> list[str]:
    """Create or update the durable consumers of a model, one a lane; their names, lowest lane first.

    Args:
        place: Of generate jobs: ``any``, or ``decode``.

    Raises:
        UnavailableError: the server is too old.
    """
    version = bus.client.connected_server_version
    if (version.major, version.minor) < OLDEST_SERVER:
        raise UnavailableError(
            f"the NATS server at EPD_NATS_URL is of version {version.major}.{version.minor}; "
            f"{'.'.join(map(str, OLDEST_SERVER))} or later is needed",
            code="nats_too_old",
        )
    names = []
    for lane in subjects.LANES:
        if stage == "encode":
            name = subjects.encode_consumer(model, lane)
            subject = subjects.encode_subject(model, lane)
        else:
            name = subjects.generate_consumer(model, lane, place)
            subject = subjects.generate_subject(model, lane, place)
        await _declare_consumer(bus, stage, name, subject)
        names.append(name)
    return names


async def declare_place(bus: Bus, model: str, worker: str) -> str:
    """Create or update the durable consumer of the jobs that are meant for one PD worker; its name.

    It goes when nobody has asked it for so long that none of its jobs can be left.
    """
    name = subjects.place_consumer(model, worker)
    subject = subjects.generate_subject(model, "*", worker)
    await _declare_consumer(bus, "generate", name, subject, inactive_s=JOB_MAX_AGE_S)
    return name


async def _declare_consumer(
    bus: Bus, stage: Stage, name: str, subject: str, *, inactive_s: float | None = None
) -> None:
    consumer = _LaneConsumer(
        durable_name=name,
        filter_subject=subject,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_WAIT_S,
        max_deliver=MAX_DELIVERIES,
        max_ack_pending=-1,
        max_waiting=512,
        inactive_threshold=inactive_s,
    )
    await once_led(partial(bus.js.add_consumer, STREAMS[stage], consumer))


async def delete_message(bus: Bus, stream: str, number: int) -> None:
    """Delete one message of a stream; one that is gone is fine."""
    try:
        await bus.js.delete_msg(stream, number)
    except APIError as error:
        if error.err_code not in _GONE:
            raise


@contextlib.contextmanager
def _unless_there() -> Iterator[None]:
    """Make something, unless another service was first."""
    try:
        yield
    except APIError as error:
        if error.err_code != _NAME_IN_USE:
            raise


async def _declare_stream(js: JetStreamContext, config: StreamConfig, *, update: bool) -> None:
    try:
        there = await once_led(lambda: js.stream_info(str(config.name)))
    except NotFoundError:
        with _unless_there():
            await once_led(lambda: js.add_stream(config))
        there = await once_led(lambda: js.stream_info(str(config.name)), exists=True)
    if update:
        config.max_consumers = there.config.max_consumers  # what a stream has of that it keeps
        await once_led(lambda: js.update_stream(config))
