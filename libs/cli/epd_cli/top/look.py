"""One look at the cluster: workers, queues, arenas, and what the workers have counted."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import nats.errors

from epd_common.bus import Bus, Registry
from epd_common.bus.queues import LaneLength, lane_lengths
from epd_common.bus.streams import STREAMS
from epd_common.errors import UnavailableError
from epd_common.health import ask_health
from epd_common.protocol import WorkerRecord
from epd_common.protocol.subjects import Stage

ANSWER_S = 2.0
"""What a worker gets to tell its counters; one that is stopped, or frozen, must not stop the view."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker's record, and whether its heart beats.

    Attributes:
        counters: None where it does not answer, or has none.
    """

    record: WorkerRecord
    alive: bool
    counters: dict[str, int] | None = None

    @property
    def state(self) -> str:
        return self.record.state if self.alive else "dead"


@dataclass(frozen=True, slots=True)
class Look:
    """What was there at one moment; ``at`` is by the monotonic clock, in seconds."""

    at: float
    workers: list[Seen] = field(default_factory=list)
    lanes: dict[Stage, dict[str, LaneLength]] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)

    def arenas(self) -> dict[str, tuple[int, int]]:
        """Used and allowed bytes of each node's arena, as one of its living workers last told."""
        return {
            seen.record.node: (seen.record.arena_used_bytes, seen.record.arena_quota_bytes)
            for seen in self.workers
            if seen.alive and seen.record.arena_quota_bytes
        }


async def look(bus: Bus, registry: Registry) -> Look:
    """Look at everything once.

    Raises:
        UnavailableError: NATS does not answer.
    """
    if not bus.connected:
        raise UnavailableError("the connection is lost", code="nats_unavailable")
    views = [(view.record, view.alive) for view in registry.workers()]
    models = registry.models()
    stages = list(STREAMS)
    try:
        lanes, counters = await asyncio.gather(
            asyncio.gather(*(_lanes(bus, stage) for stage in stages)),
            asyncio.gather(*(_counters(bus, record, alive) for record, alive in views)),
        )
    except (nats.errors.Error, TimeoutError) as error:
        raise UnavailableError(str(error) or type(error).__name__) from error
    return Look(
        at=time.monotonic(),
        workers=[
            Seen(record, alive, counted)
            for (record, alive), counted in zip(views, counters, strict=True)
        ],
        lanes=dict(zip(stages, lanes, strict=True)),
        models=models,
    )


async def _lanes(bus: Bus, stage: Stage) -> dict[str, LaneLength]:
    try:
        return await lane_lengths(bus, stage)
    except UnavailableError as error:
        if isinstance(
            error.__cause__, Exception
        ):  # else there is no such stream, as before the first start
            raise
        return {}


async def _counters(bus: Bus, record: WorkerRecord, alive: bool) -> dict[str, int] | None:
    if not alive or record.role not in ("encoder", "pd"):
        return None
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await ask_health(bus, record.worker)
    except (TimeoutError, ValueError, nats.errors.Error):
        return None
    counted = answer.get("counters")
    if not isinstance(counted, dict):
        return None
    return {str(name): n for name, n in counted.items() if isinstance(n, int)}
