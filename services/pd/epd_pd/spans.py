"""The span of one attempt at a request on a PD worker, made of its receipt."""

from __future__ import annotations

import time

from epd_common.protocol import GenerateJob
from epd_common.telemetry.traces import Span, Tracer
from epd_pd.trail import Trail


def begin(tracer: Tracer, job: GenerateJob, *, attempt: int, queued_s: float) -> Span:
    """The span of an attempt, from when its job was published."""
    return tracer.begin(
        "generate",
        kind="consumer",
        parent=job.traceparent,
        at=time.time() - queued_s,
        attributes={
            "gen_ai.request.model": job.model,
            "epd.request_id": job.request_id,
            "epd.attempt": attempt,
            "epd.items": len(job.items),
        },
    )


def end(span: Span, trail: Trail, *, outcome: str) -> None:
    """It has ended: with one span for each stage, and one for each item until it was on this node."""
    if not span.recorded:
        return
    receipt = trail.receipt()
    pulled = time.time() - receipt.ended_s

    def at(seconds: float | None) -> float | None:
        return None if seconds is None else pulled + seconds

    span.child("queued", pulled - receipt.queued_s, pulled)
    span.child("prepare", pulled, at(receipt.prepared_s))
    for item in receipt.items:
        attributes: dict[str, str | int | float | bool] = {
            "epd.key": item.key,
            "epd.encoder": item.encoder,
            "epd.store": item.store,
            "epd.rescue": item.rescue,
            "epd.bytes": item.bytes,
        }
        span.child(f"{item.modality} ready", at(receipt.prepared_s), at(item.ready_s), attributes)
        span.child(f"{item.modality} pinned", at(item.ready_s), at(item.pinned_s), attributes)
    loaded = receipt.loaded_tokens > 0
    if not loaded:
        span.child("admission", at(receipt.prepared_s), at(receipt.entered_s))
    span.child("load" if loaded else "prefill", at(receipt.entered_s), at(receipt.first_s))
    behind = "hand over" if outcome == "handed_over" else "decode"
    span.child(behind, at(receipt.first_s), at(receipt.ended_s))
    span.end(
        {
            "epd.outcome": outcome,
            "epd.prompt_tokens": receipt.prompt_tokens,
            "epd.loaded_tokens": receipt.loaded_tokens,
            "epd.resumed_tokens": receipt.resumed_tokens,
        },
        error="" if outcome in ("answered", "handed_over") else outcome,
    )
