"""What a PD worker does with one job: prepare, wait for embeddings, answer, acknowledge."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from epd_common.bus import Bus, Delivery
from epd_common.bus.streams import MAX_DELIVERIES
from epd_common.deadlines import bounded
from epd_common.engines import AnswerHead, AnswerPiece, EngineInfo, PdEngine, Told
from epd_common.errors import (
    BadRequestError,
    ConflictError,
    DeadlineError,
    EpdError,
    RequestCancelledError,
    SendAgainError,
    UnavailableError,
    UpstreamError,
)
from epd_common.ingest import Ingest
from epd_common.ingest.body import parse_body
from epd_common.orders import OrderContext
from epd_common.protocol import GenerateJob, Item, ProtocolError, decode
from epd_common.store import MediaStore
from epd_common.tasks import end
from epd_pd.admission import Admission, text_before_first_item
from epd_pd.arrivals import Arrivals, ForecastError
from epd_pd.cancels import Cancels
from epd_pd.frames import FrameWriter
from epd_pd.readiness import Readiness
from epd_pd.replays import Replays
from epd_pd.resuming import Resuming, may_go_on, told_of
from epd_pd.salvage import check_job, writer_for_undone

logger = logging.getLogger(__name__)

ROUTES = ("/v1/chat/completions", "/v1/completions")


class GenerateHandler:
    """Handles generate jobs, many at once.

    Args:
        deadline_s: Of a job that has no deadline itself, or one that is further off.
        counters: ``answered``, ``failed``, ``cancelled``, ``expired``, ``malformed``, ``resumed``.
    """

    def __init__(
        self,
        *,
        bus: Bus,
        engine: PdEngine,
        info: EngineInfo,
        ingest: Ingest,
        media: MediaStore,
        readiness: Readiness,
        admission: Admission,
        cancels: Cancels,
        replays: Replays,
        resuming: Resuming,
        worker: str,
        deadline_s: float,
        counters: Counter[str],
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._info = info
        self._ingest = ingest
        self._media = media
        self._readiness = readiness
        self._admission = admission
        self._cancels = cancels
        self._replays = replays
        self._resuming = resuming
        self._worker = worker
        self._deadline_s = deadline_s
        self._counters = counters
        self._running: dict[str, int] = {}

    async def handle(self, delivery: Delivery) -> None:
        """Do one job and settle its delivery."""
        try:
            job = decode(delivery.data, GenerateJob)
            check_job(job, self._info.model)
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
                await self._writer(job, delivery, None).error(
                    ConflictError(f"a request with the id {job.request_id} is running already")
                )
                delivery.outcome = "duplicate"
                await delivery.ack()
            # Else it is the same job again, as its heartbeats were late: what runs goes on and settles it.
            return
        self._running[job.request_id] = delivery.sequence
        keys = [item.key for item in job.items]
        try:
            async with delivery:
                writer = self._writer(job, delivery, self._replays)
                if not await self._until_cancelled(job, delivery, writer, keys):
                    # Ended without its embeddings, or perhaps so. A job that is given back keeps its place.
                    await self._readiness.let_go(keys, job.request_id)
        finally:
            del self._running[job.request_id]

    def _count(self, outcome: str, delivery: Delivery) -> None:
        delivery.outcome = outcome
        self._counters[outcome] += 1

    def _writer(self, job: GenerateJob, delivery: Delivery, replays: Replays | None) -> FrameWriter:
        return FrameWriter(
            self._bus,
            inbox=job.inbox,
            request_id=job.request_id,
            attempt=delivery.attempt,
            worker=self._worker,
            replays=replays,
        )

    async def exhausted(self, data: bytes, error: EpdError) -> None:
        """Tell the requester that nobody answers this any more."""
        writer = writer_for_undone(self._bus, data, attempt=MAX_DELIVERIES + 1, worker=self._worker)
        if writer is not None:
            await writer.error(error)

    async def _until_cancelled(
        self, job: GenerateJob, delivery: Delivery, writer: FrameWriter, keys: list[str]
    ) -> bool:
        """Whether the request was answered, and neither failed nor was cancelled."""
        with self._cancels.watch(job.request_id, job.requester) as watched:
            if await self._cancels.before(job.request_id, delivery.queued_s):
                watched.cancel()
            if not watched.cancelled.is_set():
                answer = asyncio.ensure_future(self._answer_or_error(job, delivery, writer, keys))
                watch = asyncio.ensure_future(watched.cancelled.wait())
                try:
                    await asyncio.wait((answer, watch), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await end(answer, watch)
                if not answer.cancelled():
                    return answer.result()
        self._count("cancelled", delivery)
        await writer.error(RequestCancelledError(watched.reason))
        self._replays.forget(job.request_id)
        await delivery.ack()
        return False

    async def _answer_or_error(
        self, job: GenerateJob, delivery: Delivery, writer: FrameWriter, keys: list[str]
    ) -> bool:
        """Every request ends here with its answer or with one error frame (invariant I10)."""
        fields = {"request_id": job.request_id, "attempt": delivery.attempt}
        try:
            await self._answer(job, delivery, writer, keys)
            self._count("answered", delivery)
            answered = True
        except EpdError as raised:
            # An engine, or a connection, of this worker alone.
            elsewhere = not self._engine.alive or isinstance(raised, UnavailableError)
            if elsewhere and not writer.committed and not delivery.last_attempt:
                raise  # given back: another worker answers, or goes on
            lost = not self._engine.alive and writer.committed
            error = _nobody_goes_on() if lost else raised
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
        # The answer's last frame has reached the server: the job's effect is durable.
        await delivery.ack()
        return answered

    async def _answer(
        self, job: GenerateJob, delivery: Delivery, writer: FrameWriter, keys: list[str]
    ) -> None:
        if time.time() >= job.deadline:
            raise DeadlineError("the deadline passed in the queue", stage="queue")
        waited_for: list[Arrivals] = []
        try:
            async with asyncio.timeout(job.deadline - time.time()) as bound:
                await self._answer_in_time(job, delivery, writer, keys, waited_for)
        except TimeoutError:
            if not bound.expired():
                raise
            raise _late(waited_for) from None

    async def _answer_in_time(
        self,
        job: GenerateJob,
        delivery: Delivery,
        writer: FrameWriter,
        keys: list[str],
        waited_for: list[Arrivals],
    ) -> None:
        """Answer; ``keys`` and ``waited_for`` are filled in once the request is prepared."""
        if job.route not in ROUTES:
            raise BadRequestError(
                f"the route {job.route!r} is not served; these are: {', '.join(ROUTES)}",
                code="unknown_route",
                param="route",
            )
        body = await self._body(job)
        body["priority"] = job.priority
        writer.resumable = may_go_on(body)
        told = await self._told(job, delivery, writer) if delivery.attempt > 1 else None
        prepared = await self._ingest.prepare(
            route=job.route,
            body=body,
            fingerprint=self._info.fingerprint,
            scope=job.scope,
            special_tokens=self._info.special_tokens,
            special_token_ids=self._info.special_token_ids,
            modalities=self._info.modalities,
            items=job.items,
        )
        keys[:] = [item.key for item in prepared.items]  # those of raw items as well
        context = OrderContext(
            model=job.model,
            fingerprint=self._info.fingerprint,
            request_id=job.request_id,
            scope=job.scope,
            priority=job.priority,
            deadline=job.deadline,
            traceparent=job.traceparent,
        )
        media = await self._raw_media(prepared.items)
        async with self._readiness.arriving(prepared.items, context, media) as arrivals:
            waited_for.append(arrivals)
            await self._generate(job, prepared.body, arrivals, writer, told)

    async def _told(self, job: GenerateJob, delivery: Delivery, writer: FrameWriter) -> Told | None:
        """What an older attempt has told the client; None if the answer may begin anew.

        Raises:
            UpstreamError: it has told something with which nobody can go on.
        """
        progress = await self._resuming.ask(job, delivery.attempt)
        if progress is None or progress.seq == 0:
            return None
        writer.go_on(progress)
        if not writer.resumable:
            raise _nobody_goes_on()
        self._counters["resumed"] += 1
        told = told_of(progress)
        logger.warning(
            "going on with an answer behind %d tokens",
            sum(map(len, told.tokens)),
            extra={"request_id": job.request_id, "attempt": delivery.attempt},
        )
        return told

    async def _generate(
        self,
        job: GenerateJob,
        body: dict[str, Any],
        arrivals: Arrivals,
        writer: FrameWriter,
        told: Told | None,
    ) -> None:
        """Have the engine answer, while items arrive.

        Until the last one is there the engine can say nothing, so a wrong forecast costs another beginning
        and nothing else.
        """
        text_before = text_before_first_item(body)
        while True:
            async with self._admission.enter(arrivals, text_before):
                streaming = asyncio.ensure_future(self._stream(job, body, arrivals, writer, told))
                watching = asyncio.ensure_future(self._watch(arrivals))
                try:
                    await asyncio.wait((streaming, watching), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await end(streaming, watching)
            failure = arrivals.failure
            if failure is None:
                return streaming.result()
            if not isinstance(failure, ForecastError):
                raise failure
            self._counters["wrong_forecasts"] += 1
            arrivals.begin_again()

    async def _watch(self, arrivals: Arrivals) -> None:
        """Wake the engine for each item that arrives; return when one fails."""
        while True:
            seen = arrivals.changes.count
            if arrivals.failure is not None:
                return
            await self._engine.wake()
            await arrivals.changes.since(seen)

    async def _stream(
        self,
        job: GenerateJob,
        body: dict[str, Any],
        arrivals: Arrivals,
        writer: FrameWriter,
        told: Told | None,
    ) -> None:
        writer.rewind()
        # The engine puts its own parts into the body; the next beginning needs it as it was.
        answer = self._engine.answer(
            job.request_id, job.route, copy.deepcopy(body), arrivals.placeholders(), told
        )
        async with contextlib.aclosing(answer):
            async for part in _once_known(answer, arrivals):
                if arrivals.failure is not None:
                    return  # what the engine says of a missing or unfit item is not the answer
                if not self._engine.alive:  # what it says of that is not the answer
                    raise UpstreamError("the engine died while it answered", stage="generate")
                if isinstance(part, AnswerHead):
                    await writer.head(part.status, part.content_type)
                else:
                    await writer.data(part)
        if not self._engine.alive:
            raise UpstreamError("the engine died while it answered", stage="generate")
        await writer.end()

    async def _raw_media(self, items: Sequence[Item]) -> dict[str, bytes]:
        """The bytes of those items that vLLM wants to see itself, to know how much room they take."""
        media = {}
        for item in items:
            if item.modality not in self._info.raw_modalities:
                continue
            if item.processor_args:
                # vLLM would then give the item another name than the one its embedding comes under.
                raise BadRequestError(
                    f"mm_processor_kwargs cannot be set for {item.modality} input of this model",
                    code="unsupported_parameter",
                    param="mm_processor_kwargs",
                    stage="generate",
                )
            data = item.media.inline or await self._media.get(item.media.ref or "")
            if data is None:
                raise SendAgainError(
                    f"the media of item {item.key} are no longer in the media store; send them again",
                    stage="generate",
                    key=item.key,
                    retry_after_s=1.0,
                )
            media[item.key] = data
        return media

    async def _body(self, job: GenerateJob) -> dict[str, Any]:
        raw = job.body
        if job.body_ref:
            stored = await self._media.get_body(job.body_ref)
            if stored is None:
                raise SendAgainError(
                    "the request's body is no longer in the media store; send it again",
                    code="body_gone",
                    stage="generate",
                    retry_after_s=1.0,
                )
            raw = stored
        body = parse_body(raw)
        body.setdefault("model", job.model)
        return body


async def _once_known(
    answer: AsyncIterator[AnswerHead | AnswerPiece], arrivals: Arrivals
) -> AsyncIterator[AnswerHead | AnswerPiece]:
    """The parts of an answer; a refusal only once all items are here.

    Before that it may be due to a forecast that is wrong, which then is the arrivals' failure.
    """
    try:
        async for part in answer:
            if isinstance(part, AnswerHead) and part.status >= 400:
                await arrivals.settled()
            yield part
    except EpdError:
        raise
    except Exception:
        await arrivals.settled()
        if arrivals.failure is None:
            raise


def _nobody_goes_on() -> UpstreamError:
    return UpstreamError(
        "the worker of this request was lost after its answer had begun, and an answer with these options "
        "cannot be gone on with elsewhere; send it again",
        code="worker_lost",
        stage="generate",
    )


def _late(waited_for: list[Arrivals]) -> DeadlineError:
    """The deadline's error, with the stage that was waited for."""
    if not waited_for:
        return DeadlineError("the deadline passed while the request was prepared", stage="ingest")
    (arrivals,) = waited_for
    if (key := arrivals.first_missing) is not None:
        reason = arrivals.reasons.get(key, "its state could not be read")
        return DeadlineError(
            f"the deadline passed while item {key} was being encoded: {reason}",
            stage="encode",
            key=key,
        )
    return DeadlineError(
        "the deadline passed while the answer was being generated", stage="generate"
    )
