"""Reading the dead-letter stream, and putting jobs back into their queues."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import nats.errors
import nats.js.errors

from epd_common.bus.connection import Bus
from epd_common.bus.streams import STREAMS, delete_message
from epd_common.errors import BadRequestError, NotFoundError, UnavailableError
from epd_common.protocol import EncodeJob, GenerateJob, subjects
from epd_common.protocol.codec import ProtocolError, decode
from epd_common.protocol.control import DeadLetter
from epd_common.protocol.lanes import encode_lane, generate_lane

MAX_NUMBER = (1 << 63) - 1
"""No stream will ever have a message of a higher one."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A letter and its number in the stream.

    Attributes:
        letter: None if what lies there is none.
        raw: What lies there.
        problem: Why it cannot be read.
    """

    number: int
    letter: DeadLetter | None
    raw: bytes = b""
    problem: str = ""

    def job(self) -> EncodeJob | GenerateJob | None:
        """The job inside; None if it does not decode or was too large to be kept."""
        if self.letter is None or self.letter.stage not in STREAMS:
            return None
        try:
            if self.letter.stage == "encode":
                return decode(self.letter.payload, EncodeJob)
            return decode(self.letter.payload, GenerateJob)
        except ProtocolError:
            return None

    def queue(self, job: EncodeJob | GenerateJob) -> str:
        """The subject of a job's queue: that of its stage, its model, and the letter's lane if it names one.

        The letter's own subject is whatever somebody wrote into it; what is published there is published with
        the operator's rights.

        Raises:
            ValueError: no model's queue.
        """
        tokens = self.letter.subject.split(".") if self.letter is not None else []
        lane = tokens[4] if len(tokens) > 4 and tokens[4] in subjects.LANES else ""
        if isinstance(job, EncodeJob):
            return subjects.encode_subject(job.model, lane or encode_lane(0))
        return subjects.generate_subject(
            job.model, lane or generate_lane(len(job.items), job.priority)
        )


class DeadLetters:
    """The dead-letter stream.

    All methods raise ``UnavailableError`` where the stream cannot be reached.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def all(self) -> AsyncIterator[Letter]:
        """Every letter, the oldest first."""
        try:
            info = await self._bus.js.stream_info(subjects.DLQ_STREAM)
        except nats.js.errors.NotFoundError:
            return  # no service has declared it: nothing was given up
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise _unavailable(error) from error
        for number in range(max(1, info.state.first_seq), info.state.last_seq + 1):
            with contextlib.suppress(NotFoundError):
                yield await self.get(number)

    async def get(self, number: int) -> Letter:
        """One letter, also one that cannot be read.

        Raises:
            NotFoundError: there is none of that number.
        """
        gone = NotFoundError(f"there is no dead letter {number}", code="no_letter")
        if not 1 <= number <= MAX_NUMBER:
            raise gone
        try:
            found = await self._bus.js.get_msg(subjects.DLQ_STREAM, number)
        except nats.js.errors.NotFoundError:
            raise gone from None
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise _unavailable(error) from error
        raw = found.data or b""
        try:
            return Letter(number, decode(raw, DeadLetter), raw)
        except ProtocolError as error:
            return Letter(number, None, raw, error.message)

    async def drop(self, number: int) -> None:
        """Forget a letter; one that is gone is fine."""
        try:
            await delete_message(self._bus, subjects.DLQ_STREAM, number)
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise _unavailable(error) from error

    async def requeue(self, number: int, *, timeout_s: float) -> str:
        """Put the job of a letter back into its queue, with a new deadline, and drop the letter.

        Whoever asked for an answer may be gone; the encode of an item is of use to the next who asks.

        Returns:
            The queue's subject.

        Raises:
            NotFoundError: there is no such letter.
            BadRequestError: it has no job that could be done.
        """
        found = await self.get(number)
        job = found.job()
        try:
            subject = found.queue(job) if job is not None else ""
        except ValueError:
            subject = ""
        if job is None or not subject:
            raise BadRequestError(
                f"dead letter {number} holds no job that can be read; `epd dlq show {number}` says why "
                "it was given up",
                code="no_job",
            )
        job = msgspec.structs.replace(job, deadline=time.time() + timeout_s)
        await self._bus.store(subject, job, message_id=f"requeued-{number}-{time.time_ns()}")
        await self.drop(number)
        return subject


def _unavailable(error: Exception) -> UnavailableError:
    return UnavailableError(
        f"the dead-letter stream cannot be read ({str(error) or type(error).__name__})",
        code="nats_unavailable",
    )
