"""The spans of a request at the gateway."""

from __future__ import annotations

from epd_common.ingest.body import CHAT, COMPLETIONS, RESPONSES
from epd_common.telemetry.traces import Span, Tracer
from epd_gateway.trails import Trail

_OPERATIONS = {CHAT: "chat", COMPLETIONS: "text_completion", RESPONSES: "generate_content"}
"""``gen_ai.operation.name`` of the semantic conventions."""


def begin(tracer: Tracer, *, route: str, request_id: str, model: object, parent: str) -> Span:
    """The span of a whole request.

    Args:
        parent: The client's ``traceparent``, if it sent one.
    """
    return tracer.begin(
        f"POST {route}",
        kind="server",
        parent=parent,
        attributes={
            "http.request.method": "POST",
            "http.route": route,
            "gen_ai.operation.name": _OPERATIONS[route],
            "gen_ai.request.model": model[:200] if isinstance(model, str) else "",
            "epd.request_id": request_id,
        },
    )


def end(span: Span, trail: Trail) -> None:
    """The request has ended."""
    if not span.recorded:
        return
    times = trail.times()
    span.child("ingest", times.arrived, times.ingested)
    span.child("publish", times.ingested, times.published)
    span.child("wait for the answer", times.published, times.first)
    status = trail.status
    span.end(
        {"http.response.status_code": status, "epd.outcome": trail.state},
        error=trail.code if status >= 500 else "",
    )
