"""What an encoder does with one job: fetch, encode, verify, publish, announce, acknowledge."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from epd_common.bus import Bus, Delivery
from epd_common.engines import EncoderEngine, EngineInfo
from epd_common.errors import BadRequestError, DeadlineError, EpdError, UpstreamError
from epd_common.ingest.processor_args import check_processor_args
from epd_common.protocol import EmbeddingEvent, EncodeJob, Locator, ProtocolError, decode, subjects
from epd_common.protocol.keys import digest, embedding_key, is_key
from epd_common.store import (
    Arena,
    Embedding,
    EmbeddingHeader,
    EmbeddingStore,
    KeyStates,
    MediaStore,
)

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 0.2
ENGINE_DEATHS = 2
"""An item during whose encode so many engines died is not given to a further one."""


class EncodeHandler:
    """Handles encode jobs; many at once, so that the engine can batch them.

    Args:
        remote: Stores besides the arena that get every embedding.
        locators: Where an embedding of this encoder can be read from.
        counters: ``encoded``, ``hits``, ``failed``, ``retried``, ``dropped``, ``stale``.
    """

    def __init__(
        self,
        *,
        bus: Bus,
        engine: EncoderEngine,
        info: EngineInfo,
        arena: Arena,
        remote: Sequence[EmbeddingStore],
        locators: list[Locator],
        media: MediaStore,
        states: KeyStates,
        worker: str,
        counters: Counter[str],
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._info = info
        self._arena = arena
        self._remote = remote
        self._locators = locators
        self._media = media
        self._states = states
        self._worker = worker
        self._counters = counters

    async def handle(self, delivery: Delivery) -> None:
        """Do one job and settle its delivery."""
        try:
            job = decode(delivery.data, EncodeJob)
            if not is_key(job.key):  # it becomes a subject and a file name
                raise ProtocolError(f"'key' is no embedding key: {job.key[:80]!r}")
        except ProtocolError as error:
            logger.error("malformed encode job: %s", error)
            await delivery.give_up(error)
            return
        async with delivery:
            try:
                if not await self._states.begin(job.key, job.epoch):
                    self._counters["stale"] += 1
                    await delivery.ack()
                    return
                event = await self._embedding_for(job, delivery)
            except EpdError as error:
                await self._failed(job, delivery, error)
                return
            except Exception as error:
                logger.exception("encode failed by an unexpected error")
                unexpected = UpstreamError(
                    f"unexpected {type(error).__name__} in the encoder; its log says more",
                    stage="encode",
                    key=job.key,
                )
                await self._failed(job, delivery, unexpected)
                return
            # Written and verified; now announced, and only then acknowledged (invariant I2).
            await self._announce(event)
            await delivery.ack()

    async def _embedding_for(self, job: EncodeJob, delivery: Delivery) -> EmbeddingEvent:
        if job.deadline and time.time() > job.deadline:
            raise DeadlineError(
                f"the deadline passed before item {job.key} was encoded",
                stage="encode",
                key=job.key,
            )
        if job.fingerprint != self._info.fingerprint:
            raise UpstreamError(
                f"the job wants model fingerprint {job.fingerprint[:12]}, "
                f"this encoder has {self._info.fingerprint[:12]}",
                code="fingerprint_mismatch",
                stage="encode",
                key=job.key,
            )
        present = await self._arena.get(job.key)
        if present is not None:
            # A hit is a success: announce again.
            self._counters["hits"] += 1
            await self._copy_to_remote(present)
            return self._event(job, delivery, present.header, encode_s=0.0)
        data = await self._media_of(job)
        await self._check_key(job, data)
        started = time.monotonic()

        async def on_sized(metadata: dict[str, Any]) -> None:
            await self._announce_size(job, metadata)

        staged = await self._engine.encode(
            job.key, data, job.modality, job.processor_args, on_sized
        )
        encode_s = time.monotonic() - started
        try:
            await asyncio.to_thread(self._arena.adopt, staged.path, staged.header)
        finally:
            staged.path.unlink(
                missing_ok=True
            )  # a full arena must not fill up with what it refused
        self._counters["encoded"] += 1
        if self._remote:
            published = await self._arena.get(job.key)
            if published is not None:
                await self._copy_to_remote(published)
        return self._event(job, delivery, staged.header, encode_s=encode_s)

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

    async def _announce(self, event: EmbeddingEvent) -> None:
        """Record the state, then tell who waits. A newer epoch makes both of no effect."""
        if await self._states.finish(event):
            await self._bus.emit(subjects.ready_subject(event.key), event)
        else:
            self._counters["stale"] += 1

    async def _failed(self, job: EncodeJob, delivery: Delivery, error: EpdError) -> None:
        fields = {"key": job.key, "request_id": job.request_id, "attempt": delivery.attempt}
        if not self._engine.alive and await self._states.count_death(job.key) >= ENGINE_DEATHS:
            error = BadRequestError(
                f"the encoder's engine died {ENGINE_DEATHS} times while it encoded item {job.key}; it is "
                "not tried again",
                code="media_kills_engine",
                stage="encode",
                key=job.key,
            )
        expired = isinstance(error, DeadlineError)
        permanent = error.status < 500 or expired
        if not permanent and not delivery.last_attempt:
            self._counters["retried"] += 1
            logger.warning("encode failed, to be tried again: %s", error, extra=fields)
            await delivery.retry(RETRY_DELAY_S)
            return
        self._counters["dropped" if expired else "failed"] += 1
        logger.warning("encode failed: %s", error, extra=fields)
        await self._announce(
            EmbeddingEvent(
                key=job.key,
                epoch=job.epoch,
                state="failed",
                encoder=self._worker,
                attempt=delivery.attempt,
                status=error.status,
                code=error.code,
                reason=error.message,
            )
        )
        if permanent:
            await delivery.ack()
        else:
            await delivery.give_up(error)

    def _event(
        self, job: EncodeJob, delivery: Delivery, header: EmbeddingHeader, *, encode_s: float
    ) -> EmbeddingEvent:
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
            locators=self._locators,
            encoder=self._worker,
            attempt=delivery.attempt,
            queue_s=delivery.queued_s,
            encode_s=encode_s,
        )
