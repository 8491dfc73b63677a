"""One attempt at answering a request: prepare, wait for embeddings, have the engine answer, send that."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from epd_common.beginnings import beginnings_of
from epd_common.costs import work_of
from epd_common.engines import (
    AnswerPart,
    EngineInfo,
    KvHandle,
    PdEngine,
    Told,
)
from epd_common.errors import (
    BadRequestError,
    BusyError,
    DeadlineError,
    SendAgainError,
    TooLargeError,
    UpstreamError,
)
from epd_common.ingest import Ingest
from epd_common.ingest.body import CHAT, COMPLETIONS, RESPONSES, parse_body
from epd_common.orders import OrderContext
from epd_common.protocol import GenerateJob, Item
from epd_common.store import MediaStore
from epd_common.tasks import end
from epd_common.urgency import engine_priority
from epd_pd.admission import Admission, text_before_first_item
from epd_pd.arrivals import Arrivals, ForecastError
from epd_pd.attempt import Attempt
from epd_pd.handing_over import HandingOver
from epd_pd.loading import Loading
from epd_pd.metrics import PdMetrics
from epd_pd.readiness import Readiness
from epd_pd.resuming import Resuming, may_go_on, told_of
from epd_pd.sending import once_known, send

logger = logging.getLogger(__name__)

ROUTES = (CHAT, COMPLETIONS, RESPONSES)


class Answering:
    """Answers requests with one engine.

    Args:
        long_wait_s: See :func:`epd_common.urgency.engine_priority`.
        tells_kept: Whether others are told what the engine keeps of prompts.
        loading: Answers what was handed over.
        handing_over: A prefill worker's.
        counters: ``resumed``, ``wrong_forecasts``.
        metrics: Say how long what is ready takes to and through the engine.
    """

    def __init__(
        self,
        *,
        engine: PdEngine,
        info: EngineInfo,
        ingest: Ingest,
        media: MediaStore,
        readiness: Readiness,
        admission: Admission,
        resuming: Resuming,
        long_wait_s: float,
        tells_kept: bool,
        loading: Loading,
        handing_over: HandingOver | None,
        counters: Counter[str],
        metrics: PdMetrics,
    ) -> None:
        self._tells_kept = tells_kept
        self._handing_over = handing_over
        self._loading = loading
        self._engine = engine
        self._info = info
        self._ingest = ingest
        self._media = media
        self._readiness = readiness
        self._admission = admission
        self._resuming = resuming
        self._long_wait_s = long_wait_s
        self._counters = counters
        self._metrics = metrics

    @property
    def engine_alive(self) -> bool:
        return self._engine.alive

    async def answer(self, attempt: Attempt) -> None:
        """Send the whole answer.

        Raises:
            EpdError: why that cannot be done; nothing was sent about it.
        """
        deadline = attempt.job.deadline
        if time.time() >= deadline:
            raise DeadlineError("the deadline passed in the queue", stage="queue")
        try:
            async with asyncio.timeout(deadline - time.time()) as bound:
                await self._answer_in_time(attempt)
        except TimeoutError:
            if not bound.expired():
                raise
            raise _late(attempt.arrivals) from None

    async def let_go(self, attempt: Attempt) -> None:
        """The request has ended without its embeddings, or perhaps so: it waits for none of them."""
        await self._readiness.let_go(attempt.keys, attempt.job.request_id)

    async def _answer_in_time(self, attempt: Attempt) -> None:
        job, writer = attempt.job, attempt.writer
        if job.route not in ROUTES:
            raise BadRequestError(
                f"the route {job.route!r} is not served; these are: {', '.join(ROUTES)}",
                code="unknown_route",
                param="route",
            )
        body = await self._body(job)
        writer.resumable = may_go_on(body)
        told = await self._told(attempt) if attempt.delivered > 1 else None
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
        attempt.keys = [item.key for item in prepared.items]
        if self._tells_kept:
            attempt.beginnings = beginnings_of(job.route, prepared.body, prepared.items)
        context = OrderContext(
            model=job.model,
            fingerprint=self._info.fingerprint,
            request_id=job.request_id,
            scope=job.scope,
            priority=job.priority,
            deadline=job.deadline,
            traceparent=attempt.traceparent,
        )
        work = work_of(
            job.route,
            prepared.body,
            prepared.items,
            [None] * len(prepared.items),
            max_model_len=self._info.max_model_len,
        )
        prompt_tokens = attempt.trail.prompt_tokens = work.text + (work.visual or 0)
        media = await self._raw_media(prepared.items)
        if await self._loading.answer(attempt, prepared, media):
            return
        attempt.share.estimate(prompt_tokens)
        prepared.body["priority"] = engine_priority(
            job.priority,
            published=attempt.published,
            prompt_tokens=prompt_tokens,
            long_wait_s=self._long_wait_s,
        )
        async with self._readiness.arriving(prepared.items, context, media) as arrivals:
            attempt.arrivals = arrivals
            attempt.trail.prepared(prepared.items, arrivals.marks)
            await self._generate(attempt, prepared.body, arrivals, told)

    async def _told(self, attempt: Attempt) -> Told | None:
        """What an older attempt has told the client; None if the answer may begin anew.

        Raises:
            UpstreamError: it has told something with which nobody can go on.
        """
        progress = await self._resuming.ask(attempt.job, attempt.number)
        if progress is None or progress.seq == 0:
            return None
        attempt.writer.go_on(progress)
        if not attempt.writer.resumable:
            raise nobody_goes_on()
        self._counters["resumed"] += 1
        told = told_of(progress)
        attempt.trail.resumed_tokens = sum(map(len, told.tokens))
        logger.warning(
            "going on with an answer behind %d tokens",
            attempt.trail.resumed_tokens,
            extra=attempt.log_fields,
        )
        return told

    async def _generate(
        self, attempt: Attempt, body: dict[str, Any], arrivals: Arrivals, told: Told | None
    ) -> None:
        """Have the engine answer, while items arrive.

        Until the last one is there the engine can say nothing, so a wrong forecast costs another beginning
        and nothing else.
        """
        text_before = text_before_first_item(attempt.job.route, body)
        while True:
            async with self._admission.enter(arrivals, text_before):
                attempt.trail.entered()
                streaming = asyncio.ensure_future(self._stream(attempt, body, arrivals, told))
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
            attempt.trail.restarts += 1
            arrivals.begin_again()

    async def _watch(self, arrivals: Arrivals) -> None:
        """Wake the engine for each item that arrives; return when one fails."""
        while True:
            seen = arrivals.changes.count
            if arrivals.failure is not None:
                return
            await self._engine.wake()
            self._metrics.told(arrivals)
            await arrivals.changes.since(seen)

    async def _stream(
        self, attempt: Attempt, body: dict[str, Any], arrivals: Arrivals, told: Told | None
    ) -> None:
        """Have the engine answer, or prefill for others."""
        over = self._handing_over
        if over is None or told is not None:
            await self._answer_here(attempt, body, arrivals, told)
        elif not over.wanted(
            attempt.job.route,
            body,
            prompt_tokens=attempt.trail.prompt_tokens,
            again=attempt.delivered > 1,
        ) or not await self._hand_over(attempt, body, arrivals, over):
            with over.whole():
                await self._answer_here(attempt, body, arrivals, None)

    async def _answer_here(
        self, attempt: Attempt, body: dict[str, Any], arrivals: Arrivals, told: Told | None
    ) -> None:
        # The engine puts its own parts into the body; the next beginning needs it as it was.
        answer = self._engine.answer(
            attempt.job.request_id,
            attempt.job.route,
            copy.deepcopy(body),
            arrivals.placeholders(),
            told,
            beginnings=attempt.beginnings,
            traceparent=attempt.traceparent,
        )
        async with contextlib.aclosing(answer):
            await self._send(attempt, once_known(answer, arrivals), arrivals)

    async def _hand_over(
        self, attempt: Attempt, body: dict[str, Any], arrivals: Arrivals, over: HandingOver
    ) -> bool:
        """Prefill, and publish the decode job; False if the queue has no room for it."""
        placeholders = arrivals.placeholders()
        answer = self._engine.answer(
            attempt.job.request_id,
            attempt.job.route,
            copy.deepcopy(body),
            placeholders,
            beginnings=attempt.beginnings,
            traceparent=attempt.traceparent,
            hand_over=True,
        )
        async with contextlib.aclosing(answer):
            handle = await self._send(attempt, once_known(answer, arrivals), arrivals)
        if handle is None:  # a refusal, and that is the answer
            return True
        attempt.trail.answered()
        try:
            await over.publish(
                attempt.job,
                handle,
                metadata=[placeholder.metadata for placeholder in placeholders],
                attempt=attempt.number,
                sequence=attempt.sequence,
                lane=attempt.lane,
                receipt=attempt.trail.receipt(),
            )
        except (BusyError, TooLargeError) as error:
            logger.warning("answering here: %s", error, extra=attempt.log_fields)
            return False
        attempt.handed_over = True
        return True

    async def _send(
        self, attempt: Attempt, parts: AsyncIterator[AnswerPart], arrivals: Arrivals | None
    ) -> KvHandle | None:
        return await send(attempt, self._engine, parts, arrivals=arrivals, metrics=self._metrics)

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


def nobody_goes_on() -> UpstreamError:
    """A part of an answer was told that can only end in an error."""
    return UpstreamError(
        "the worker of this request was lost after its answer had begun, and an answer with these options "
        "cannot be resumed on another worker; send it again",
        code="worker_lost",
        stage="generate",
    )


def _late(arrivals: Arrivals | None) -> DeadlineError:
    """The deadline's error, with the stage that was waited for."""
    if arrivals is None:
        return DeadlineError("the deadline passed while the request was prepared", stage="ingest")
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
