"""What a PD worker does with the messages of its queue: answer, acknowledge, or give back."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import msgspec

from epd_common.backlog import Backlog
from epd_common.bus import Bus, Delivery
from epd_common.bus.streams import MAX_DELIVERIES
from epd_common.costs import prompt_tokens_at_sight
from epd_common.deadlines import bounded
from epd_common.errors import (
    ConflictError,
    DeadlineError,
    EpdError,
    UnavailableError,
)
from epd_common.protocol import GenerateJob, ProtocolError, decode, subjects
from epd_common.tasks import end
from epd_common.telemetry.traces import Tracer
from epd_pd import spans
from epd_pd.answering import Answering, nobody_goes_on
from epd_pd.attempt import Attempt
from epd_pd.cancels import Cancels
from epd_pd.frames import FrameWriter
from epd_pd.metrics import PdMetrics
from epd_pd.replays import Replays
from epd_pd.salvage import check_job, writer_for_undone
from epd_pd.trail import Trail

logger = logging.getLogger(__name__)

LAST_ATTEMPT = 2 * MAX_DELIVERIES + 1
"""Number of what is said when nobody is left to try, behind all attempts of a job and of its decode job."""


class GenerateHandler:
    """Handles generate jobs, many at once.

    Args:
        deadline_s: Of a job that has no deadline itself, or one that is further off.
        counters: ``answered``, ``handed_over``, ``failed``, ``cancelled``, ``expired``, ``malformed``,
            ``taken_over``.
        metrics: Say how long hand-overs take.
    """

    def __init__(
        self,
        *,
        bus: Bus,
        answering: Answering,
        model: str,
        cancels: Cancels,
        replays: Replays,
        worker: str,
        node: str,
        tracer: Tracer,
        backlog: Backlog,
        deadline_s: float,
        counters: Counter[str],
        metrics: PdMetrics,
    ) -> None:
        self._bus = bus
        self._answering = answering
        self._model = model
        self._cancels = cancels
        self._replays = replays
        self._worker = worker
        self._node = node
        self._tracer = tracer
        self._backlog = backlog
        self._deadline_s = deadline_s
        self._counters = counters
        self._metrics = metrics
        self._running: dict[str, int] = {}

    async def handle(self, delivery: Delivery) -> None:
        """Do one job and settle its delivery."""
        try:
            job = decode(delivery.data, GenerateJob)
            check_job(job, self._model, subject=delivery.subject)
        except ProtocolError as error:
            self._count("malformed", delivery)
            logger.error("malformed generate job: %s", error)
            writer = writer_for_undone(
                self._bus, delivery.data, attempt=delivery.attempt, worker=self._worker
            )
            if writer is not None:
                await writer.error(error)
            await delivery.give_up(error)
            return
        due = bounded(job.deadline, published=delivery.published, limit_s=self._deadline_s)
        job = msgspec.structs.replace(job, deadline=due)  # nothing waits without bound
        if (running := self._running.get(job.request_id)) is not None:
            if running != delivery.sequence:
                await self._writer(job, delivery).error(
                    ConflictError(f"a request with the id {job.request_id} is running already")
                )
                delivery.outcome = "duplicate"
                await delivery.ack()
            # Else it is the same job again, as its heartbeats were late: what runs goes on and settles it.
            return
        self._running[job.request_id] = delivery.sequence
        number, shown = _number(job, delivery), _shown(job, delivery)
        trail = Trail(
            worker=self._worker,
            node=self._node,
            attempt=shown,
            began=delivery.received,
            queued_s=delivery.queued_s,
            prefill=job.handover.receipt if job.handover else None,
        )
        span = spans.begin(self._tracer, job, attempt=shown, queued_s=delivery.queued_s)
        writer = self._writer(job, delivery, replays=self._replays, receipt=trail.receipt)
        share = self._backlog.add(0 if job.handover else prompt_tokens_at_sight(job))
        attempt = Attempt(
            job=job,
            number=number,
            delivered=delivery.attempt,
            sequence=delivery.sequence,
            lane=subjects.lane_of(delivery.subject),
            published=delivery.published,
            queued_s=delivery.queued_s,
            writer=writer,
            share=share,
            trail=trail,
            traceparent=span.traceparent,
            keys=[item.key for item in job.items],
        )
        try:
            async with delivery:
                if not await self._until_cancelled(attempt, delivery):
                    # A job that is given back keeps its place among those who wait.
                    await self._answering.let_go(attempt)
        finally:
            share.end()
            spans.end(span, trail, outcome=delivery.outcome)
            if job.handover is not None:
                self._metrics.decoded(trail)
            del self._running[job.request_id]

    def _count(self, outcome: str, delivery: Delivery) -> None:
        delivery.outcome = outcome
        self._counters[outcome] += 1

    def _writer(self, job: GenerateJob, delivery: Delivery, **more: Any) -> FrameWriter:
        return FrameWriter(
            self._bus,
            inbox=job.inbox,
            request_id=job.request_id,
            attempt=_number(job, delivery),
            worker=self._worker,
            **more,
        )

    async def exhausted(self, data: bytes, error: EpdError) -> None:
        """Tell the requester that nobody answers this any more."""
        writer = writer_for_undone(self._bus, data, attempt=LAST_ATTEMPT, worker=self._worker)
        if writer is not None:
            await writer.error(error)

    async def _until_cancelled(self, attempt: Attempt, delivery: Delivery) -> bool:
        """Whether the request neither failed nor was cancelled: it was answered, or is another attempt's."""
        job = attempt.job
        with self._cancels.watch(job.request_id, job.requester, attempt.number) as watched:
            if await self._cancels.before(job.request_id, delivery.queued_s):
                watched.cancel()
            if not watched.cancelled.is_set():
                answer = asyncio.ensure_future(self._answer_or_error(attempt, delivery))
                watch = asyncio.ensure_future(watched.cancelled.wait())
                try:
                    await asyncio.wait((answer, watch), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await end(answer, watch)
                if not answer.cancelled():
                    return answer.result()
        self._replays.forget(job.request_id)
        if watched.taken_over:
            self._count("taken_over", delivery)
            delivery.leave()
            return True
        self._count("cancelled", delivery)
        await attempt.writer.error(watched.error)
        await delivery.ack()
        return False

    async def _answer_or_error(self, attempt: Attempt, delivery: Delivery) -> bool:
        """Every request ends here with its answer or with one error frame (invariant I10)."""
        writer, fields = attempt.writer, attempt.log_fields
        try:
            await self._answering.answer(attempt)
            self._count("handed_over" if attempt.handed_over else "answered", delivery)
            answered = True
        except EpdError as raised:
            # An engine, or a connection, of this worker alone.
            elsewhere = not self._answering.engine_alive or isinstance(raised, UnavailableError)
            if elsewhere and not writer.committed and not delivery.last_attempt:
                raise  # given back: another worker answers, or goes on
            lost = not self._answering.engine_alive and writer.committed
            error = nobody_goes_on() if lost else raised
            expired = isinstance(error, DeadlineError)
            self._count("expired" if expired else "failed", delivery)
            logger.warning("request failed: %s", error, extra=fields | error.fields())
            await writer.error(error)
            answered = False
        except Exception:
            if not writer.committed and not delivery.last_attempt:
                raise  # given back, with a delay
            logger.exception("request failed by an unexpected error", extra=fields)
            self._count("failed", delivery)
            unexpected = EpdError(
                "an unexpected error in the PD worker; its log says more", stage="generate"
            )
            await writer.error(unexpected)
            await delivery.give_up(unexpected)
            return False
        # The answer's last frame, or the decode job, has reached the server: the job's effect is durable.
        await delivery.ack()
        return answered


def _number(job: GenerateJob, delivery: Delivery) -> int:
    """Which attempt at the request this is.

    Those of decode jobs come behind all that their prefill workers can have: a prefill worker whose
    acknowledgement was lost is followed by another one, which may answer itself this time.
    """
    return delivery.attempt + (MAX_DELIVERIES if job.handover else 0)


def _shown(job: GenerateJob, delivery: Delivery) -> int:
    """The same for people: how often a worker has begun with the request."""
    return delivery.attempt + (job.handover.attempt if job.handover else 0)
