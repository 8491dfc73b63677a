"""The span of one encode, with what it took inside."""

from __future__ import annotations

import time

from epd_common.protocol import EmbeddingEvent, EncodeJob
from epd_common.telemetry.traces import Span, Tracer


def begin(tracer: Tracer, job: EncodeJob, *, attempt: int, queued_s: float) -> Span:
    """The span of an encode, from when its job was published."""
    return tracer.begin(
        "encode",
        kind="consumer",
        parent=job.traceparent,
        at=time.time() - queued_s,
        attributes={
            "epd.request_id": job.request_id,
            "epd.key": job.key,
            "epd.modality": job.modality,
            "epd.attempt": attempt,
        },
    )


def end(span: Span, event: EmbeddingEvent | None, *, error: str) -> None:
    """It has come to this.

    Args:
        event: What is announced; None where nobody waits for it any more, or it failed.
    """
    if not span.recorded:
        return
    if event is None:
        span.end({"epd.outcome": "failed" if error else "dropped"}, error=error)
        return
    until = time.time()
    begun = until - event.media_s - event.encode_s - event.publish_s
    span.child("queued", begun - event.queue_s, begun)
    if event.encode_s:
        span.child("fetch media", begun, begun + event.media_s)
        span.child("vision tower", begun + event.media_s, until - event.publish_s)
        span.child("publish embedding", until - event.publish_s, until)
    span.end(
        {
            "epd.outcome": "encoded" if event.encode_s else "hit",
            "epd.rows": event.rows,
            "epd.bytes": event.bytes,
        }
    )
