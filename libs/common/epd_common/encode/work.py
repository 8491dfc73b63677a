"""One embedding, from its job to its announcement: fetch, check, encode, publish, announce."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from epd_common.bus import Bus
from epd_common.encode import spans
from epd_common.encode.company import Company
from epd_common.encode.tower_door import TowerDoor, Visit
from epd_common.engines import EncoderEngine, EngineInfo, StagedEmbedding
from epd_common.errors import BadRequestError, DeadlineError, EpdError, UpstreamError
from epd_common.ingest.processor_args import check_arguments_fit, check_processor_args
from epd_common.protocol import EmbeddingEvent, EncodeJob, Locator, subjects
from epd_common.protocol.keys import digest, embedding_key
from epd_common.store import (
    Arena,
    Embedding,
    EmbeddingHeader,
    IntegrityError,
    KeyStates,
    MediaStore,
    RemoteStore,
    Suspects,
    UnwantedError,
)
from epd_common.store.suspects import DEATHS_ALONE
from epd_common.telemetry.traces import Tracer
from epd_common.telemetry.worker_metrics import EncodeMetrics

logger = logging.getLogger(__name__)


class Laps:
    """A stop watch."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last lap, or since the beginning."""
        before, self._last = self._last, time.monotonic()
        return self._last - before


class Encoding:
    """Makes embeddings with one engine, and tells everybody.

    Args:
        remote: Stores besides the arena that get every embedding, nearest first.
        here: This node's arena, if PD workers read from it.
        counters: ``encoded``, ``embedding_bytes``, ``hits``, ``stale``, ``unwanted``.
        metrics: Say how long each part takes.
    """

    def __init__(
        self,
        *,
        bus: Bus,
        engine: EncoderEngine,
        info: EngineInfo,
        arena: Arena,
        remote: Sequence[RemoteStore],
        here: Locator | None,
        media: MediaStore,
        states: KeyStates,
        suspects: Suspects,
        worker: str,
        tracer: Tracer,
        counters: Counter[str],
        metrics: EncodeMetrics,
    ) -> None:
        self._tracer = tracer
        self._bus = bus
        self._engine = engine
        self._info = info
        self._arena = arena
        self._remote = remote
        self._here = here
        self._media = media
        self._states = states
        self._suspects = suspects
        self._door = TowerDoor()
        self._company = Company(lambda: engine.alive)
        self._worker = worker
        self._counters = counters
        self._metrics = metrics
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()

    async def make(
        self,
        job: EncodeJob,
        *,
        sequence: int | None = None,
        attempt: int = 1,
        queued_s: float = 0.0,
    ) -> EmbeddingEvent | None:
        """Have the embedding written and verified; the event that announces it.

        None if nobody waits for this epoch of the key: a newer one is under way, or all who waited have gone.
        That is looked at before the media are fetched, and once more before the engine gets the item; what it
        has then is encoded, for the next who asks.

        Args:
            sequence: The job's number in its queue, if it was in one: the older go first.

        Raises:
            EpdError: it could not be made; :meth:`failure` makes the event of that.
        """
        span = spans.begin(self._tracer, job, attempt=attempt, queued_s=queued_s)
        event, error = None, "cancelled"
        try:
            event = await self._make_if_wanted(job, sequence, attempt, queued_s)
            error = ""
            return event
        except EpdError as failure:
            error = failure.code
            raise
        finally:
            spans.end(span, event, error=error)

    async def _make_if_wanted(
        self, job: EncodeJob, sequence: int | None, attempt: int, queued_s: float
    ) -> EmbeddingEvent | None:
        clock = Laps()
        try:
            with self._door.arrived(sequence) as visit:
                if not await self._states.begin(job.key, job.epoch):
                    self._counters["stale"] += 1
                    return None
                async with self._alone(job.key):
                    return await self._make(job, visit, attempt, queued_s, clock)
        except UnwantedError:
            self._counters["unwanted"] += 1
            return None
        except EpdError:
            raise
        except Exception as error:
            logger.exception("encode failed by an unexpected error")
            raise UpstreamError(
                f"unexpected {type(error).__name__} in the encoder; its log says more",
                stage="encode",
                key=job.key,
            ) from error

    @contextlib.asynccontextmanager
    async def _alone(self, key: str) -> AsyncIterator[None]:
        """One encode of a key at a time: two would share the engine's file, and the second finds the first
        one's embedding."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._locks[key]

    async def announce(self, event: EmbeddingEvent) -> None:
        """Record the state, then tell who waits. A newer epoch makes both of no effect."""
        if await self._states.finish(event):
            await self._bus.emit(subjects.ready_subject(event.key), event)
        else:
            self._counters["stale"] += 1

    def failure(self, job: EncodeJob, error: EpdError, *, attempt: int = 1) -> EmbeddingEvent:
        """The event of an embedding that could not be made."""
        return EmbeddingEvent(
            key=job.key,
            epoch=job.epoch,
            state="failed",
            encoder=self._worker,
            attempt=attempt,
            status=error.status,
            code=error.code,
            reason=error.message,
        )

    async def judge(self, job: EncodeJob, error: EpdError) -> EpdError:
        """The error to go on with: an item that ends engine after engine is at fault itself."""
        if self._engine.alive or not (await self._suspects.look(job.key)).proved:
            return error
        return _kills(job.key)

    async def _make(
        self, job: EncodeJob, visit: Visit, attempt: int, queued_s: float, clock: Laps
    ) -> EmbeddingEvent:
        if job.fingerprint != self._info.fingerprint:
            raise UpstreamError(
                f"the job wants model fingerprint {job.fingerprint[:12]}, "
                f"this encoder has {self._info.fingerprint[:12]}",
                code="fingerprint_mismatch",
                stage="encode",
                key=job.key,
            )
        present = await self._present(job.key)
        if present is not None:
            # A hit is a success: announce again.
            self._counters["hits"] += 1
            await self._copy_to_remote(present)
            return self._event(job, present.header, attempt, queued_s)
        try:
            async with asyncio.timeout(
                job.deadline - time.time() if job.deadline else None
            ) as bound:
                data = await self._media_of(job)
                await self._check_key(job, data)
                media_s = clock.lap()
                staged = await self._encode(job, data, visit)
        except TimeoutError:
            if not bound.expired():
                raise
            raise DeadlineError(
                f"the deadline passed before item {job.key} was encoded",
                stage="encode",
                key=job.key,
            ) from None
        encode_s = clock.lap()
        try:
            await asyncio.to_thread(self._arena.adopt, staged.path, staged.header)
        finally:
            staged.path.unlink(
                missing_ok=True
            )  # a full arena must not fill up with what it refused
        self._counters["encoded"] += 1
        self._counters["embedding_bytes"] += staged.header.payload_bytes
        if self._remote:
            published = await self._arena.get(job.key)
            if published is not None:
                await self._copy_to_remote(published)
        took = (media_s, encode_s, clock.lap())
        self._metrics.note(job.modality, *took)
        return self._event(job, staged.header, attempt, queued_s, took)

    async def _present(self, key: str) -> Embedding | None:
        """The embedding, if it is there and a PD worker can take it."""
        found = await self._arena.get(key)
        if found is not None:
            try:
                self._info.check_rows(found.header)
            except IntegrityError as error:
                logger.warning("unusable embedding dropped: %s", error, extra={"key": key})
                await self._arena.delete(key)
                return None
        return found

    async def _encode(self, job: EncodeJob, data: bytes, visit: Visit) -> StagedEmbedding:
        """Have the engine encode. What may have killed another one is given to it alone: what happens then is
        its own doing, and it takes nobody with it."""

        async def on_sized(metadata: dict[str, Any]) -> None:
            if metadata:
                await self._announce_size(job, metadata)
            await visit.enter()

        key, suspicion = job.key, await self._suspects.look(job.key)
        if suspicion.proved:
            raise _kills(key)
        suspect = suspicion.suspect
        async with self._company.enter(alone=suspect) as stay:
            await self._suspects.begin(key, alone=suspect)
            if not self._engine.alive:  # it died of another one, for which this one waited
                await self._suspects.end(key, alone=suspect)
                raise UpstreamError("the encoder's engine is dead", stage="encode", key=key)
            try:
                staged = await self._engine.encode(
                    key, data, job.modality, job.processor_args, on_sized
                )
            except BaseException:
                if self._engine.alive:
                    await self._suspects.end(key, alone=suspect)
                elif stay.alone and not suspect:
                    await self._suspects.died_alone(key)
                raise
            finally:
                visit.leave()
        try:
            with contextlib.suppress(EpdError):  # then it is encoded alone for a while
                await self._suspects.clear(key)
        except BaseException:
            staged.path.unlink(missing_ok=True)
            raise
        return staged

    def _locators(self, key: str) -> list[Locator]:
        """Where an embedding can be read from now, nearest first."""
        places = [self._here, *(store.locator(key) for store in self._remote)]
        return [place for place in places if place is not None]

    async def _copy_to_remote(self, embedding: Embedding) -> None:
        for store in self._remote:
            if not await store.contains(embedding.header.key):
                await store.put(embedding)

    async def _media_of(self, job: EncodeJob) -> bytes:
        if job.media.inline is not None:
            return job.media.inline
        data = await self._media.get(job.media.ref or "")
        if data is None:
            raise BadRequestError(
                f"the media of item {job.key} are no longer in the media store; send them again",
                code="media_gone",
                stage="encode",
                key=job.key,
            )
        return data

    async def _check_key(self, job: EncodeJob, data: bytes) -> None:
        """A key names its bytes (invariant I9); whoever publishes a job may claim anything."""
        check_processor_args(job.processor_args, "processor_args")
        check_arguments_fit(job.processor_args, job.modality, "processor_args")
        if job.processor_args and job.modality in self._info.raw_modalities:
            raise BadRequestError(
                f"this model takes no processor arguments with {job.modality} input",
                code="unsupported_parameter",
                param="mm_processor_kwargs",
                stage="encode",
                key=job.key,
            )
        if job.modality not in self._info.modalities:
            raise BadRequestError(
                f"modality {job.modality!r} is not encoded here",
                code="modality_not_supported",
                stage="encode",
                key=job.key,
            )
        right = embedding_key(
            media_digest=await asyncio.to_thread(digest, data),
            fingerprint=job.fingerprint,
            modality=job.modality,
            processor_args=job.processor_args,
            scope=job.scope,
        )
        if right != job.key:
            raise BadRequestError(
                f"the key {job.key} is not that of the media that came with it",
                code="key_mismatch",
                stage="encode",
                key=job.key,
            )

    async def _announce_size(self, job: EncodeJob, metadata: dict[str, Any]) -> None:
        """Tell PD workers how much room the item takes, before its embedding is there."""
        event = EmbeddingEvent(
            key=job.key,
            epoch=job.epoch,
            state="sized",
            fingerprint=self._info.fingerprint,
            metadata=metadata,
            encoder=self._worker,
        )
        if await self._states.size(event):
            await self._bus.emit(subjects.ready_subject(job.key), event)

    def _event(
        self,
        job: EncodeJob,
        header: EmbeddingHeader,
        attempt: int,
        queued_s: float,
        took: tuple[float, float, float] = (0.0, 0.0, 0.0),
    ) -> EmbeddingEvent:
        media_s, encode_s, publish_s = took
        return EmbeddingEvent(
            key=job.key,
            epoch=job.epoch,
            state="ready",
            fingerprint=header.fingerprint,
            metadata=header.metadata,
            rows=header.rows,
            width=header.width,
            dtype=header.dtype,
            bytes=header.payload_bytes,
            checksum=header.checksum,
            locators=self._locators(job.key),
            encoder=self._worker,
            attempt=attempt,
            queue_s=queued_s,
            media_s=media_s,
            encode_s=encode_s,
            publish_s=publish_s,
        )


def _kills(key: str) -> BadRequestError:
    return BadRequestError(
        f"{DEATHS_ALONE} encoders died while they encoded item {key} and nothing else; it is not tried "
        "again for some minutes",
        code="media_kills_engine",
        stage="encode",
        key=key,
    )
