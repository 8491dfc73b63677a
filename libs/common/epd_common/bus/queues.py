"""How long the work queues are: what decides whether a stage needs more workers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import nats.errors
import nats.js.errors

from epd_common.bus.connection import Bus
from epd_common.bus.streams import STREAMS
from epd_common.errors import UnavailableError
from epd_common.protocol import subjects
from epd_common.protocol.subjects import Stage

LOOK_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class QueueLength:
    """The jobs of a stage that are not done, those in work included."""

    jobs: dict[str, int]
    """By the model's token in the subject, which whoever publishes may choose."""
    oldest_s: float
    """Seconds since the oldest of them was published; 0 without any."""


async def queue_length(bus: Bus, stage: Stage) -> QueueLength:
    """Look at a stage's queue.

    Raises:
        UnavailableError: the server does not answer, or has no such queue.
    """
    info = await _info(bus, stage)
    jobs: Counter[str] = Counter()
    for name, count in (info["state"].get("subjects") or {}).items():
        jobs[name.split(".")[3]] += count
    oldest_s = 0.0
    if jobs:  # both times are of the server's clock
        oldest_s = (_time(info["ts"]) - _time(info["state"]["first_ts"])).total_seconds()
    return QueueLength(dict(jobs), max(oldest_s, 0.0))


@dataclass(frozen=True, slots=True)
class LaneLength:
    """The jobs of a stage on one lane that are not done, those in work included."""

    jobs: int
    oldest_s: float
    """Seconds since the oldest of them was published."""


async def lane_lengths(bus: Bus, stage: Stage) -> dict[str, LaneLength]:
    """Look at a stage's queue lane by lane; lanes without jobs are left out.

    For the age of each lane its oldest job is read, whole: for people who look, not for each second of a
    service.

    Raises:
        UnavailableError: the server does not answer, or has no such queue.
    """
    info = await _info(bus, stage)
    jobs: Counter[str] = Counter()
    for name, count in (info["state"].get("subjects") or {}).items():
        jobs[name.split(".")[4]] += count
    now = _time(info["ts"])
    found = {}
    for lane, count in sorted(jobs.items()):
        published = await _oldest(bus, stage, lane)
        age_s = 0.0 if published is None else (now - published).total_seconds()
        found[lane] = LaneLength(count, max(age_s, 0.0))
    return found


async def _info(bus: Bus, stage: Stage) -> dict[str, Any]:
    """What JetStream says of a stage's stream; nats-py leaves out the time of the oldest message."""
    subject, asked = f"$JS.API.STREAM.INFO.{STREAMS[stage]}", b'{"subjects_filter": ">"}'
    try:
        reply = await bus.client.request(subject, asked, timeout=LOOK_TIMEOUT_S)
    except (nats.errors.Error, TimeoutError) as error:
        raise UnavailableError(
            f"NATS does not say how long the queue of {stage} jobs is "
            f"({str(error) or type(error).__name__})",
            code="nats_unavailable",
        ) from error
    info: dict[str, Any] = json.loads(reply.data)
    if "state" not in info:
        raise UnavailableError(f"there is no queue of {stage} jobs", code="nats_unavailable")
    return info


async def _oldest(bus: Bus, stage: Stage, lane: str) -> datetime | None:
    """When the oldest job of a lane was published; None where it is gone meanwhile."""
    filtered = f"epd.v1.{stage}.*.{lane}" + (".*" if stage == "generate" else "")
    asked = json.dumps({"seq": 1, "next_by_subj": filtered}).encode()
    subject = f"$JS.API.STREAM.MSG.GET.{STREAMS[stage]}"
    try:
        reply = await bus.client.request(subject, asked, timeout=LOOK_TIMEOUT_S)
    except (nats.errors.Error, TimeoutError):
        return None
    message = json.loads(reply.data).get("message")
    return None if message is None else _time(message["time"])


async def places_with_jobs(bus: Bus, model: str) -> set[str]:
    """For which places there are generate jobs of a model that are not done, those in work included.

    Raises:
        UnavailableError: the server does not answer, or has no such queue.
    """
    wanted = subjects.generate_subject(model, "*", "*")
    try:
        info = await bus.js.stream_info(STREAMS["generate"], subjects_filter=wanted)
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
        raise UnavailableError(
            f"NATS does not say where generate jobs wait ({str(error) or type(error).__name__})",
            code="nats_unavailable",
        ) from error
    return {subject.rpartition(".")[2] for subject in info.state.subjects or ()}


def _time(text: str) -> datetime:
    """Of RFC 3339 with up to nine decimals, of which Python takes six."""
    seconds, _, fraction = text.removesuffix("Z").partition(".")
    return datetime.fromisoformat(f"{seconds}.{fraction[:6]:0<6}+00:00")
