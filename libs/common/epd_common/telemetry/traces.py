"""Traces by OpenTelemetry: one a request, from the gateway over encoders to the PD worker.

Spans have times of their own, as most of what they tell is known only afterwards. Their context travels with
the jobs, as W3C ``traceparent``. Without ``EPD_OTLP_ENDPOINT`` nothing is recorded, a client's context is
handed on as it came, and OpenTelemetry is not even imported. What is no context goes no further than here.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Literal

from epd_common.errors import UnavailableError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer as OtelTracer

Kind = Literal["server", "consumer", "internal"]
Attributes = Mapping[str, str | int | float | bool]

CLOSE_S = 3.0
"""Seconds in which the last spans are sent when a process ends; a collector is not waited for longer."""

MOST_CHARACTERS = 256
"""Of a text in a span; more is cut off."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""Clients write it, and it goes into headers of messages, for which there is little room: one that is too
long would cost the whole process its connection."""


class Span:
    """One that has begun. This one records nothing; see :class:`_Recorded`.

    Attributes:
        traceparent: What jobs that are done for it carry.
        recorded: Whether anybody will see it; what it would tell need not be gathered else.
    """

    recorded = False

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def child(
        self,
        name: str,
        begin: float | None,
        end: float | None,
        attributes: Attributes | None = None,
    ) -> None:
        """A part of it, by its times in seconds since the Unix epoch; without one it did not come to pass."""

    def end(self, attributes: Attributes | None = None, *, error: str = "") -> None:
        """It ends now.

        Args:
            error: What went wrong, as a short word.
        """


class Tracer:
    """Begins spans. This one records none."""

    def begin(
        self,
        name: str,
        *,
        kind: Kind,
        parent: str = "",
        at: float | None = None,
        attributes: Attributes | None = None,
    ) -> Span:
        """A span that ends later.

        Args:
            parent: The ``traceparent`` it belongs to; one that is empty or none begins a trace.
            at: When it began, in seconds since the Unix epoch; None: now.
        """
        del name, kind, at, attributes
        return Span(parent if _TRACEPARENT.fullmatch(parent) else "")


class _Recorded(Span):
    """One that is sent to the collector."""

    recorded = True

    def __init__(self, tracer: OtelTracer, span: OtelSpan) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._span = span
        self._context: Context = set_span_in_context(span)
        context = span.get_span_context()
        super().__init__(
            f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        )

    def child(
        self,
        name: str,
        begin: float | None,
        end: float | None,
        attributes: Attributes | None = None,
    ) -> None:
        if begin is None or end is None:
            return
        span = self._tracer.start_span(
            name, context=self._context, attributes=dict(attributes or {}), start_time=_ns(begin)
        )
        span.end(_ns(max(begin, end)))

    def end(self, attributes: Attributes | None = None, *, error: str = "") -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attributes(dict(attributes or {}))
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class _Recording(Tracer):
    def __init__(self, tracer: OtelTracer) -> None:
        self._tracer = tracer

    def begin(
        self,
        name: str,
        *,
        kind: Kind,
        parent: str = "",
        at: float | None = None,
        attributes: Attributes | None = None,
    ) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {"traceparent": parent}
        span = self._tracer.start_span(
            name,
            # A context of its own: what happens to be the current one is another request's.
            context=TraceContextTextMapPropagator().extract(carrier, Context()),
            kind=SpanKind[kind.upper()],
            attributes=dict(attributes or {}),
            start_time=_ns(time.time() if at is None else at),
        )
        return _Recorded(self._tracer, span)


@contextlib.asynccontextmanager
async def open_tracer(
    endpoint: str, *, sample: float, service: str, instance: str
) -> AsyncIterator[Tracer]:
    """The tracer of a process; its last spans are sent at the end.

    Args:
        endpoint: Of an OTLP collector, by HTTP, e.g. ``http://collector:4318``; empty: none.
        sample: Share of the traces that begin here which are recorded. Those that a client began go by what
            it says.
        service: ``service.name``.
        instance: ``service.instance.id``.

    Raises:
        UnavailableError: the packages are not installed.
    """
    if not endpoint:
        yield Tracer()
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise UnavailableError(
            f"EPD_OTLP_ENDPOINT is set, and OpenTelemetry is not installed ({error}); install "
            "`epdflow[tracing]`, or set nothing"
        ) from error
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample)),
        span_limits=SpanLimits(max_span_attribute_length=MOST_CHARACTERS),
        resource=Resource.create({"service.name": service, "service.instance.id": instance}),
        shutdown_on_exit=False,
    )
    url = f"{endpoint.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=CLOSE_S)))
    try:
        yield _Recording(provider.get_tracer("epdflow"))
    finally:
        await _shut(provider)


async def _shut(provider: TracerProvider) -> None:
    """Send the last spans, within ``CLOSE_S``."""
    loop, sent = asyncio.get_running_loop(), asyncio.Event()

    def shut() -> None:
        provider.shutdown()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(sent.set)

    # None of the loop's own threads: its end would wait for each of their batches.
    threading.Thread(target=shut, name="last spans", daemon=True).start()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await sent.wait()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
