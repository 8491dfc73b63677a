"""Ordering work: claims keys and publishes encode and generate jobs.

The gateway, the client library and PD workers (for media of direct jobs, and for embeddings that went
missing) all order through this one module.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import nats.errors
import nats.js.errors

from epd_common.bus.connection import Bus
from epd_common.bus.streams import JOB_MAX_AGE_S, delete_message
from epd_common.errors import EpdError
from epd_common.protocol import Cancel, EncodeJob, GenerateJob, Item, subjects
from epd_common.protocol.codec import encode
from epd_common.protocol.lanes import BACKGROUND_LANE, encode_lane, generate_lane
from epd_common.store import Claim, KeyStates, MediaStore, Waiter
from epd_common.tasks import whole

logger = logging.getLogger(__name__)

TAKE_OFF_S = 0.5
"""A cancelled job is taken off its queue within this time, or left for a worker to drop."""

BODY_MARGIN_S = 10.0
"""A large body stays in the media store so long after its request's deadline, as clocks differ: a worker that
still takes the job says that it is late, not that the body is gone."""


@dataclass(frozen=True, slots=True)
class OrderContext:
    """What all jobs of one request have in common.

    Attributes:
        owner: The tenant in whose quota its body is.
        background: They go behind those of others.
        place: The PD worker that its generate job is meant for, if any.
    """

    model: str
    fingerprint: str
    request_id: str
    deadline: float = 0.0
    traceparent: str = ""
    scope: str = ""
    owner: str = ""
    priority: int = 0
    background: bool = False
    place: str = subjects.ANY_PLACE

    def waiter(self) -> Waiter | None:
        """Who waits for the items: a request until its deadline, an early upload as long as a job lives."""
        if not self.request_id:
            return None
        left_s = self.deadline - time.time() if self.deadline else JOB_MAX_AGE_S
        return Waiter(self.request_id, min(left_s, JOB_MAX_AGE_S))


@dataclass(frozen=True, slots=True)
class Submitted:
    """What became of a request's keys, its job's number in the queue, and where its body lies if that was too
    large for the job."""

    claims: list[Claim]
    sequence: int
    body_ref: str = ""


def encode_job(item: Item, epoch: int, context: OrderContext) -> EncodeJob:
    """The job that encodes an item whose key was claimed with this epoch."""
    return EncodeJob(
        key=item.key,
        epoch=epoch,
        model=context.model,
        fingerprint=context.fingerprint,
        modality=item.modality,
        media=item.media,
        processor_args=item.processor_args,
        scope=context.scope,
        deadline=context.deadline,
        request_id=context.request_id,
        traceparent=context.traceparent,
    )


class Orders:
    """Publishes jobs. Embeddings are ordered once, whoever asks (single-flight by ``KeyStates``)."""

    def __init__(self, bus: Bus, states: KeyStates, media: MediaStore) -> None:
        self._bus = bus
        self._states = states
        self._media = media

    async def claim(
        self,
        items: Sequence[Item],
        context: OrderContext,
        *,
        useless: Mapping[str, int] | None = None,
        rescue: bool = False,
    ) -> list[Claim]:
        """The state of each item's key; ``claimed`` ones are the caller's to publish.

        With ``rescue`` they are the caller's to encode itself. The context's request waits from now on for
        those that are not there, until :meth:`let_go`.
        """
        keys = [item.key for item in items]
        claiming = asyncio.ensure_future(
            self._states.claim(keys, useless=useless, rescue=rescue, waiter=context.waiter())
        )
        try:
            return await whole(claiming)
        except asyncio.CancelledError:
            # A claim whose answer nobody has read would hold its key until its lease is over.
            if claiming.exception() is None:
                await whole(self._give_back(keys, claiming.result()))
            raise

    async def _give_back(self, keys: Sequence[str], claims: Sequence[Claim]) -> None:
        with contextlib.suppress(EpdError):
            for key, claim in zip(keys, claims, strict=True):
                if claim.state == "claimed":
                    await self._states.abandon(key, claim.epoch)

    async def let_go(self, keys: Sequence[str], request_id: str) -> None:
        """A request waits for none of these any more. What else waits for them gets them all the same."""
        with contextlib.suppress(EpdError):  # its marks have an end
            jobs = await self._states.let_go(keys, request_id)
            taking = (self._take_off(subjects.ENCODE_STREAM, job, request_id) for job in jobs)
            await asyncio.gather(*taking)

    async def state(self, item: Item) -> Claim | None:
        """The state of an item's key as it is; None if nobody knows it."""
        (found,) = await self._states.read([item.key])
        return found

    async def publish_encodes(
        self, items: Sequence[Item], claims: Sequence[Claim], context: OrderContext
    ) -> None:
        """Publish an encode job for each item whose claim is ours, all at once.

        Raises:
            EpdError: a job was not taken; its claim is given back, so that another may try.
        """
        ours = [
            (place, item, claim)
            for place, (item, claim) in enumerate(zip(items, claims, strict=True))
            if claim.state == "claimed"
        ]
        results = await asyncio.gather(
            *(self._publish_encode(place, item, claim, context) for place, item, claim in ours),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _publish_encode(
        self, place: int, item: Item, claim: Claim, context: OrderContext
    ) -> None:
        job = encode_job(item, claim.epoch, context)
        lane = BACKGROUND_LANE if context.background else encode_lane(place, context.priority)
        try:
            sequence = await self._bus.store(
                subjects.encode_subject(context.model, lane),
                job,
                # The epoch keeps the duplicate window from swallowing a new encode after an eviction.
                message_id=f"encode-{item.key}-{claim.epoch}",
                traceparent=job.traceparent,
            )
        except BaseException:
            await self._states.abandon(item.key, claim.epoch)
            raise
        with contextlib.suppress(
            EpdError
        ):  # then an encoder takes it, and looks whether it is wanted
            if not await self._states.published(item.key, claim.epoch, sequence):
                await self._take_off(subjects.ENCODE_STREAM, sequence, context.request_id)

    async def publish_generate(
        self, job: GenerateJob, *, background: bool = False, place: str = subjects.ANY_PLACE
    ) -> int:
        """Publish a generate job; its number in the queue."""
        lane = BACKGROUND_LANE if background else generate_lane(len(job.items), job.priority)
        if lane == BACKGROUND_LANE:
            # By its place it could have the slots that are kept free of it.
            place = subjects.ANY_PLACE
        return await self._bus.store(
            subjects.generate_subject(job.model, lane, place),
            job,
            message_id=f"generate-{job.request_id}",
            traceparent=job.traceparent,
        )

    async def submit(self, job: GenerateJob, context: OrderContext) -> Submitted:
        """Claim the job's keys, then publish its encode jobs and itself at the same moment.

        A body too large for a message goes to the media store before, as there may be no room for it there.

        Raises:
            EpdError: something was not taken; then the request does not run.
        """
        if len(encode(job)) <= self._bus.max_payload_bytes:
            return await self._submit(job, context)
        left_s = job.deadline + BODY_MARGIN_S - time.time() if job.deadline else JOB_MAX_AGE_S
        ttl_s = math.ceil(min(max(left_s, 1.0), JOB_MAX_AGE_S))
        ref = await self._media.put_body(job.body, ttl_s=ttl_s, owner=context.owner)
        job = msgspec.structs.replace(job, body=b"", body_ref=ref)
        try:
            return await self._submit(job, context)
        except BaseException:
            await self.forget_body(ref, context)
            raise

    async def forget_body(self, ref: str, context: OrderContext) -> None:
        """The request whose body lies there has ended."""
        with contextlib.suppress(EpdError):  # then it goes when its time is over
            await self._media.delete_body(ref, owner=context.owner)

    async def _submit(self, job: GenerateJob, context: OrderContext) -> Submitted:
        if not job.items:
            return await self._submit_text(job, context)
        claims = await self.claim(job.items, context)
        encodes = self.publish_encodes(job.items, claims, context)
        generate = self.publish_generate(job, background=context.background, place=context.place)
        _, sequence = results = await asyncio.gather(encodes, generate, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            # The generate job may have been taken although an encode job was not.
            await self.withdraw(
                job, sequence if isinstance(sequence, int) else 0, "not submitted whole"
            )
            raise failures[0]
        assert isinstance(sequence, int)
        return Submitted(claims, sequence, job.body_ref)

    async def _submit_text(self, job: GenerateJob, context: OrderContext) -> Submitted:
        try:
            sequence = await self.publish_generate(
                job, background=context.background, place=context.place
            )
        except BaseException:
            await self.withdraw(job, 0, "not submitted whole")
            raise
        return Submitted([], sequence, job.body_ref)

    async def withdraw(self, job: GenerateJob, sequence: int, reason: str) -> None:
        """Take a request back wherever it is: off its queue, from who works on it, and from who waits.

        Off the queue first: who got the job before listens to cancels, so one that is sent after that reaches
        him, and nobody gets it later.

        Args:
            sequence: The job's number in the queue; 0 if it is not known.
        """
        if sequence:
            await self._take_off(subjects.GENERATE_STREAM, sequence, job.request_id)
        cancel = Cancel(request_id=job.request_id, reason=reason)
        with contextlib.suppress(EpdError):  # then its deadline ends it
            await self._bus.emit(subjects.cancel_subject(job.request_id), cancel)
        await self.let_go([item.key for item in job.items], job.request_id)

    async def _take_off(self, stream: str, sequence: int, request_id: str) -> None:
        """Delete a job from its queue, or leave it to be dropped by the worker that gets it."""
        try:
            async with asyncio.timeout(TAKE_OFF_S):
                await delete_message(self._bus, stream, sequence)
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            logger.warning(
                "a job that nobody wants stays in its queue, for a worker to drop: %s",
                str(error) or type(error).__name__,
                extra={"request_id": request_id},
            )
