"""Streams, consumers and buckets, declared explicitly and idempotently.

``pull_subscribe`` on an existing durable ignores a new configuration silently, so nothing here relies
on it: whoever starts declares what it needs, and a changed setting is an update.
"""

from __future__ import annotations

import contextlib

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
from nats.js.errors import APIError, BadRequestError, NotFoundError

from epd_common.bus.connection import Bus
from epd_common.protocol import subjects
from epd_common.protocol.subjects import Stage

ACK_WAIT_S = 2.0
"""A job whose worker is silent for this long is given to another; workers send ``in_progress``."""

MAX_DELIVERIES = 5
JOB_MAX_AGE_S = 3600.0
"""No job is worth doing after this; what nobody takes does not fill a queue for ever."""

DUPLICATE_WINDOW_S = 120.0
DLQ_MAX_MESSAGES = 10_000
DLQ_MAX_AGE_S = 7 * 24 * 3600.0
_NO_MESSAGE, _SEQUENCE_NOT_FOUND = 10037, 10057  # JetStream's error codes
WORKERS_TTL_S = 60.0
"""A record nobody renews leaves the bucket after this; readers go by the heartbeat, sooner."""

STREAMS: dict[Stage, str] = {
    "encode": subjects.ENCODE_STREAM,
    "generate": subjects.GENERATE_STREAM,
}

ADVISORY_SUBJECTS: dict[Stage, str] = {
    stage: f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{stream}.>"
    for stage, stream in STREAMS.items()
}
"""Where the server says that it delivers a job of a stage no more."""


async def declare_streams(
    bus: Bus, *, max_jobs: int, replicas: int = 1, update: bool = True
) -> None:
    """Create the work queues, the dead-letter stream and the registry bucket, where they are missing.

    Args:
        update: Also give them these settings where they have others. That right is the gateway's: who has it
            could have jobs sent elsewhere, or thrown away.
    """
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
    with contextlib.suppress(BadRequestError):  # another service was first
        await bus.js.create_key_value(
            KeyValueConfig(
                bucket=subjects.WORKERS_BUCKET, history=1, ttl=WORKERS_TTL_S, replicas=replicas
            )
        )


async def declare_consumers(bus: Bus, stage: Stage, model: str) -> list[str]:
    """Create or update the durable consumers of a model, one a lane; their names, lowest lane first."""
    names = []
    for lane in subjects.LANES:
        if stage == "encode":
            name = subjects.encode_consumer(model, lane)
            subject = subjects.encode_subject(model, lane)
        else:
            name = subjects.generate_consumer(model, lane)
            subject = subjects.generate_subject(model, lane)
        await bus.js.add_consumer(
            STREAMS[stage],
            ConsumerConfig(
                durable_name=name,
                filter_subject=subject,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=ACK_WAIT_S,
                max_deliver=MAX_DELIVERIES,
                max_ack_pending=-1,
                max_waiting=512,
            ),
        )
        names.append(name)
    return names


async def delete_message(bus: Bus, stream: str, number: int) -> None:
    """Delete one message of a stream; one that is gone is fine."""
    try:
        await bus.js.delete_msg(stream, number)
    except APIError as error:
        if error.err_code not in (_NO_MESSAGE, _SEQUENCE_NOT_FOUND):
            raise


async def _declare_stream(js: JetStreamContext, config: StreamConfig, *, update: bool) -> None:
    try:
        await js.stream_info(str(config.name))
    except NotFoundError:
        with contextlib.suppress(BadRequestError):  # another service was first
            await js.add_stream(config)
            return
    if update:
        await js.update_stream(config)
