"""Ordering work: claims keys and publishes encode and generate jobs.

The gateway, the client library and PD workers (for media of direct jobs, and for embeddings that went
missing) all order through this one module.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from epd_common.bus.connection import Bus
from epd_common.errors import EpdError
from epd_common.protocol import Cancel, EncodeJob, GenerateJob, Item, subjects
from epd_common.protocol.codec import encode
from epd_common.protocol.lanes import BACKGROUND_LANE, encode_lane, generate_lane
from epd_common.store import Claim, KeyStates, MediaStore


@dataclass(frozen=True, slots=True)
class OrderContext:
    """What all encode jobs of one request have in common."""

    model: str
    fingerprint: str
    request_id: str
    deadline: float = 0.0
    traceparent: str = ""
    scope: str = ""
    priority: int = 0
    background: bool = False


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
        *,
        useless: Mapping[str, int] | None = None,
        rescue: bool = False,
    ) -> list[Claim]:
        """The state of each item's key; ``claimed`` ones are the caller's to publish.

        With ``rescue`` they are the caller's to encode itself.
        """
        keys = [item.key for item in items]
        return await self._states.claim(keys, useless=useless, rescue=rescue)

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
            await self._bus.store(
                subjects.encode_subject(context.model, lane),
                job,
                # The epoch keeps the duplicate window from swallowing a new encode after an eviction.
                message_id=f"encode-{item.key}-{claim.epoch}",
            )
        except BaseException:
            await self._states.abandon(item.key, claim.epoch)
            raise

    async def publish_generate(self, job: GenerateJob) -> None:
        """Publish a generate job; a body too large for a message goes to the media store."""
        if len(encode(job)) > self._bus.max_payload_bytes:
            ref = await self._media.put_body(job.body)
            job = msgspec.structs.replace(job, body=b"", body_ref=ref)
        await self._bus.store(
            subjects.generate_subject(job.model, generate_lane(len(job.items), job.priority)),
            job,
            message_id=f"generate-{job.request_id}",
        )

    async def submit(self, job: GenerateJob, context: OrderContext) -> list[Claim]:
        """Claim the job's keys, then publish its encode jobs and itself at the same moment.

        Raises:
            EpdError: something was not taken; then the request does not run.
        """
        claims = await self.claim(job.items)
        encodes = self.publish_encodes(job.items, claims, context)
        generate = self.publish_generate(job)
        results = await asyncio.gather(encodes, generate, return_exceptions=True)
        for result in results:
            if isinstance(result, EpdError):
                # The generate job may have been taken although an encode job was not.
                cancel = Cancel(request_id=job.request_id, reason="not submitted whole")
                with contextlib.suppress(EpdError):
                    await self._bus.emit(subjects.cancel_subject(job.request_id), cancel)
            if isinstance(result, BaseException):
                raise result
        return claims
