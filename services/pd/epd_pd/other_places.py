"""Which other workers' queues a PD worker looks into, so that no job waits for one that is gone or full.

The queue itself says for which places it has jobs. So a place is found whoever used it, also one whose worker
was never seen here. Where the worker is ready a few others look, chosen by rendezvous; where it is not, all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Set

import nats.errors
import nats.js.errors

from epd_common.bus import Bus, JobPuller, Registry, declare_consumers, declare_place
from epd_common.bus.queues import places_with_jobs
from epd_common.errors import EpdError
from epd_common.protocol.subjects import ANY_PLACE, DECODE_PLACE, is_worker
from epd_common.rendezvous import ranked
from epd_common.tasks import end

logger = logging.getLogger(__name__)

LOOK_S, QUIET_LOOK_S = 0.5, 1.0
"""Seconds between looks, the second where no job has a place."""

LOOKERS = 4
"""Workers that look into the queue of one that is ready."""

MOST = 32
"""Places that a worker looks into at once; who publishes jobs may name any that there never were."""

DECLARE_AGAIN_S = 30.0
"""A queue's consumer goes when nobody has asked it for long; so who looks makes sure of it now and then."""


def to_look_into(
    own: str, holding: Set[str], ready: Set[str], *, decoders: bool = True
) -> list[str]:
    """The places that a worker looks into. Pure policy.

    Args:
        own: The worker.
        holding: Places that have jobs.
        ready: Workers that take jobs.
        decoders: Whether there are decode workers that do; what was handed over is anybody's, if not.
    """
    stranded = {DECODE_PLACE} & holding if not decoders else set()
    found = [*stranded] + [
        place
        for place in sorted(holding - {own})
        if is_worker(place)
        and (place not in ready or own in ranked(place, ready - {place})[:LOOKERS])
    ]
    return found[:MOST]


@contextlib.asynccontextmanager
async def looking_into_other_places(
    bus: Bus,
    puller: JobPuller,
    registry: Registry,
    *,
    model: str,
    worker: str,
    counters: Counter[str],
) -> AsyncIterator[None]:
    """While open, a puller knows of the queues of others that it should look into.

    Args:
        counters: ``from_others`` counts the jobs that it took there.
    """

    async def look() -> None:
        declared: dict[str, list[str]] = {}
        declared_at = time.monotonic()
        while True:
            pause_s = QUIET_LOOK_S
            if time.monotonic() - declared_at >= DECLARE_AGAIN_S:
                declared.clear()
                declared_at = time.monotonic()
            if puller.taken_from_others:
                counters["from_others"] = puller.taken_from_others
            try:
                holding = await places_with_jobs(bus, model)
                if holding - {ANY_PLACE}:
                    pause_s = LOOK_S
                ready = {record.worker for record in registry.answering(model)}
                decoders = bool(registry.decoding(model))
                places = to_look_into(worker, holding, ready, decoders=decoders)
                for place in places:
                    if place not in declared:
                        declared[place] = await _consumers(bus, model, place)
                puller.look_at([name for place in places for name in declared[place]])
            except (nats.errors.Error, nats.js.errors.Error, EpdError, TimeoutError) as error:
                logger.warning("places of other workers: %s", str(error) or type(error).__name__)
            await asyncio.sleep(pause_s)

    task = asyncio.create_task(look(), name="other places")
    try:
        yield
    finally:
        await end(task)


async def _consumers(bus: Bus, model: str, place: str) -> list[str]:
    """Those of a place's jobs."""
    if place == DECODE_PLACE:
        return await declare_consumers(bus, "generate", model, place)
    return [await declare_place(bus, model, place)]
