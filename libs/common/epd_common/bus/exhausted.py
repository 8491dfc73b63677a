"""Jobs whose last delivery ended without a word, as when each worker that had one was killed.

The queue keeps such a job for ever and gives it to nobody. All it does is to publish an advisory, once, to
whoever listens; so a stream of its own keeps the advisories until a worker has dealt with the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from epd_common.bus.connection import Bus
from epd_common.bus.delivery import bury
from epd_common.bus.streams import ADVISORY_SUBJECTS, STREAMS, delete_message
from epd_common.errors import EpdError, UpstreamError
from epd_common.protocol import subjects
from epd_common.protocol.control import DeadLetter
from epd_common.protocol.names import names_in
from epd_common.protocol.subjects import Stage
from epd_common.tasks import end

logger = logging.getLogger(__name__)

FETCH_S = 5.0
RETRY_S = 1.0
ACK_WAIT_S = 10.0

OnExhausted = Callable[[bytes, EpdError], Awaitable[None]]
"""Tells whoever waits for a job that nobody will do it any more: ``await tell(data, error)``."""


class _Advisory(msgspec.Struct):
    """What the server says of such a job."""

    stream_seq: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    deliveries: int


@contextlib.asynccontextmanager
async def burying_exhausted(bus: Bus, stage: Stage, tell: OnExhausted) -> AsyncIterator[None]:
    """While open, jobs of a stage that nobody will get any more are buried and told of.

    Every worker of a stage does that; each job falls to one of them.
    """
    task = asyncio.create_task(_Undertaker(bus, stage, tell).run(), name=f"exhausted {stage}")
    try:
        yield
    finally:
        await end(task)


class _Undertaker:
    def __init__(self, bus: Bus, stage: Stage, tell: OnExhausted) -> None:
        self._bus = bus
        self._stage: Stage = stage
        self._tell = tell
        self._name = f"exhausted-{stage}"

    async def run(self) -> None:
        while True:
            try:
                await self._follow()
            except (nats.errors.Error, nats.js.errors.Error, EpdError, TimeoutError) as error:
                logger.warning("exhausted jobs: %s; looking again", error)
                await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        await self._bus.js.add_consumer(
            subjects.EXHAUSTED_STREAM,
            ConsumerConfig(
                durable_name=self._name,
                filter_subject=ADVISORY_SUBJECTS[self._stage],
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=ACK_WAIT_S,
                max_waiting=512,
            ),
        )
        advisories = await self._bus.js.pull_subscribe_bind(self._name, subjects.EXHAUSTED_STREAM)
        try:
            while True:
                with contextlib.suppress(nats.errors.TimeoutError):
                    for message in await advisories.fetch(1, timeout=FETCH_S):
                        await self._deal_with(message)
        finally:
            with contextlib.suppress(nats.errors.Error):
                await advisories.unsubscribe()

    async def _deal_with(self, message: Msg) -> None:
        try:
            advisory = msgspec.json.decode(message.data, type=_Advisory)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as unreadable:
            logger.error("exhausted jobs: an advisory cannot be read: %s", unreadable)
            await message.term()
            return
        stream, number = STREAMS[self._stage], advisory.stream_seq
        with contextlib.suppress(nats.js.errors.NotFoundError):  # dealt with already
            job = await self._bus.js.get_msg(stream, number)
            error = UpstreamError(
                f"{advisory.deliveries} workers had this {self._stage} job and none of them finished "
                "it; their logs say more",
                code="worker_lost",
                stage=self._stage,
            )
            data = job.data or b""
            logger.error(
                "burying job %d of %s: %s", number, job.subject, error, extra=names_in(data)
            )
            await self._tell(data, error)
            await bury(
                self._bus,
                DeadLetter(
                    stage=self._stage,
                    subject=job.subject or "",
                    reason=error.message,
                    code=error.code,
                    worker="",
                    attempts=advisory.deliveries,
                    at=time.time(),
                    payload=data,
                ),
                sequence=number,
            )
            await delete_message(self._bus, stream, number)
        await message.ack()
