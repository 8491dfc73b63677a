"""A request, and one try at answering it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epd_common.backlog import Share
from epd_common.beginnings import Beginning
from epd_common.protocol import GenerateJob
from epd_pd.arrivals import Arrivals
from epd_pd.frames import FrameWriter
from epd_pd.trail import Trail


@dataclass(slots=True)
class Attempt:
    """A request, and one try at answering it.

    Attributes:
        number: Which attempt at it this is, from 1; that of a decode job counts on from its prefill worker's.
        delivered: How often its job was delivered, this time included.
        sequence: The job's number in its stream, and ``lane`` where it was there.
        published: When the job was, by the broker's clock, which is ``queued_s`` ago.
        share: What it adds to the worker's backlog.
        trail: What happened to it so far.
        traceparent: Of what is done for it here.
        keys: Of its items; those of raw ones only once it is prepared.
        arrivals: What it waits for, once it is prepared.
        beginnings: By which others know its prompt, once it is prepared.
        handed_over: Its decode job is published, so others answer it.
    """

    job: GenerateJob
    number: int
    delivered: int
    sequence: int
    lane: str
    published: float
    queued_s: float
    writer: FrameWriter
    share: Share
    trail: Trail
    traceparent: str
    keys: list[str] = field(default_factory=list)
    arrivals: Arrivals | None = None
    beginnings: list[Beginning] = field(default_factory=list)
    handed_over: bool = False

    @property
    def log_fields(self) -> dict[str, Any]:
        return {"request_id": self.job.request_id, "attempt": self.number}
