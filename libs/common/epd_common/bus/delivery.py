"""One delivered job: kept alive while it is worked on, and settled exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

import msgspec
import nats.errors
from nats.aio.msg import Msg

from epd_common.bus.connection import Bus
from epd_common.bus.streams import ACK_WAIT_S, MAX_DELIVERIES
from epd_common.errors import EpdError
from epd_common.protocol import subjects
from epd_common.protocol.codec import encode
from epd_common.protocol.control import DeadLetter
from epd_common.protocol.subjects import Stage

logger = logging.getLogger(__name__)

HEARTBEAT_S = ACK_WAIT_S / 4


async def bury(bus: Bus, letter: DeadLetter, *, sequence: int) -> None:
    """Put a letter into the dead-letter stream; the same job twice is one letter.

    Args:
        sequence: The job's number in its stream.
    """
    if len(encode(letter)) > bus.max_payload_bytes:
        letter = msgspec.structs.replace(letter, payload=b"")
    await bus.store(
        subjects.dlq_subject(letter.stage), letter, message_id=f"{letter.stage}-{sequence}"
    )


class Delivery:
    """One delivered job. ``ack``, ``retry``, ``give_up`` and ``leave`` each settle it; the first one wins.

    As an async context manager it tells the server every ``HEARTBEAT_S`` that work goes on.
    """

    def __init__(self, bus: Bus, stage: Stage, worker: str, message: Msg) -> None:
        self._bus = bus
        self._stage = stage
        self._worker = worker
        self._message = message
        self._settled = False
        self._beat: asyncio.Task[None] | None = None
        self.data: bytes = message.data
        self.subject: str = message.subject
        self.received = time.monotonic()
        self.outcome = ""
        """What became of the job, for the worker's accounts: its handler's word, or how it was settled."""

    @property
    def attempt(self) -> int:
        """How often this job was delivered, this time included."""
        return int(self._message.metadata.num_delivered)

    @property
    def sequence(self) -> int:
        """The job's number in its stream: the same at each of its deliveries."""
        return int(self._message.metadata.sequence.stream)

    @property
    def last_attempt(self) -> bool:
        return self.attempt >= MAX_DELIVERIES

    @property
    def published(self) -> float:
        """When the job was put into its queue, in seconds since the Unix epoch."""
        return float(self._message.metadata.timestamp.timestamp())

    @property
    def queued_s(self) -> float:
        """Seconds from publishing to this delivery, by wall clocks."""
        return max(0.0, time.time() - self.published)

    async def ack(self) -> None:
        """The job's effect is durable, or it needs none: forget it."""
        self.outcome = self.outcome or "done"
        await self._settle(self._message.ack)

    async def retry(self, delay_s: float) -> None:
        """Give the job back, to be delivered again after a delay; after the last attempt nobody gets it."""
        if not self._settled:
            self.outcome = "given_back"
        await self._settle(lambda: self._message.nak(delay=delay_s))

    def leave(self) -> None:
        """Say no more of it: a later delivery of the job is another worker's."""
        self._settled = True

    async def give_up(self, error: EpdError) -> None:
        """Put the job into the dead-letter stream with the reason, then take it off the queue."""
        if self._settled:
            return
        letter = DeadLetter(
            stage=self._stage,
            subject=self.subject,
            reason=error.message,
            code=error.code,
            worker=self._worker,
            attempts=self.attempt,
            at=time.time(),
            payload=self.data,
        )
        await bury(self._bus, letter, sequence=self.sequence)
        self.outcome = self.outcome or "given_up"
        await self._settle(self._message.term)

    async def _settle(self, action: Callable[[], Awaitable[None]]) -> None:
        if self._settled:
            return
        self._settled = True
        try:
            await action()
        except nats.errors.Error as error:
            # The server will deliver the job again; every effect is idempotent.
            logger.warning("could not settle a job of %s: %s", self.subject, error)

    async def __aenter__(self) -> Self:
        self._beat = asyncio.create_task(self._keep_alive(), name=f"in-progress {self.subject}")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._beat is not None:
            self._beat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beat

    async def _keep_alive(self) -> None:
        while not self._settled:
            await asyncio.sleep(HEARTBEAT_S)
            if self._settled:
                return
            try:
                await self._message.in_progress()
            except nats.errors.Error as error:
                logger.warning("heartbeat of a job of %s failed: %s", self.subject, error)
