"""Traces: one a request over all services, at a collector that listens."""

from __future__ import annotations

import asyncio
import gzip
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from epd_common.errors import UnavailableError
from epd_common.telemetry.traces import CLOSE_S, MOST_CHARACTERS, open_tracer
from service_stack import CHAT, picture
from sim_stack import sim_stack

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Keeps what OTLP exporters send."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """The service's name, and the span."""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        for of_service in ExportTraceServiceRequest.FromString(body).resource_spans:
            attributes = {pair.key: pair.value for pair in of_service.resource.attributes}
            name = attributes["service.name"].string_value
            for scope in of_service.scope_spans:
                self.spans += [(name, span) for span in scope.spans]

    def named(self, service: str, name: str) -> list[Any]:
        return [span for at, span in self.spans if (at, span.name) == (service, name)]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    listening = Collector()
    yield listening
    listening.close()


def value_of(span: Any, name: str) -> Any:
    (value,) = [pair.value for pair in span.attributes if pair.key == name]
    return getattr(value, value.WhichOneof("value"))


@pytest.mark.slow
async def test_one_trace_goes_through_all_services(
    collector: Collector, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with sim_stack(nats_url, redis_url, tmp_path) as stack:
        stack.settings["otlp_endpoint"] = collector.url
        await stack.start(otlp_endpoint=collector.url)
        headers = {"traceparent": PARENT}
        body = stack.body("x", picture((16, 16)), picture((24, 24)))
        answer = await stack.http.post(CHAT, json=body, headers=headers)
        assert answer.status_code == 200
        bad = await stack.http.post(CHAT, json={**body, "model": "none"})
        assert bad.status_code == 404

    (root,) = [
        span
        for span in collector.named("epd-gateway", f"POST {CHAT}")
        if value_of(span, "epd.request_id") == answer.headers["x-request-id"]
    ]
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert value_of(root, "gen_ai.operation.name") == "chat"
    assert value_of(root, "gen_ai.request.model") == stack.model
    assert value_of(root, "http.response.status_code") == 200
    mine = [(at, span) for at, span in collector.spans if span.trace_id == root.trace_id]
    assert root.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"

    (generate,) = collector.named("epd-pd", "generate")
    encodes = collector.named("epd-encoder", "encode")
    assert len(encodes) == 2
    for span in (generate, *encodes):
        assert span.parent_span_id == root.span_id and span.trace_id == root.trace_id
    assert {value_of(span, "epd.outcome") for span in encodes} == {"encoded"}
    ids = {span.span_id for _, span in mine}
    assert all(span.parent_span_id in ids for _, span in mine if span is not root)
    of_pd = [span.name for at, span in mine if at == "epd-pd"]
    for stage in ("queued", "prepare", "prefill", "decode"):
        assert of_pd.count(stage) == 1
    assert of_pd.count("image ready") == of_pd.count("image pinned") == 2
    assert [span.name for at, span in mine if at == "epd-encoder"].count("vision tower") == 2
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for _, span in mine)

    (refused,) = [
        span
        for span in collector.named("epd-gateway", f"POST {CHAT}")
        if value_of(span, "http.response.status_code") == 404
    ]
    assert refused.trace_id != root.trace_id, "a request without a context begins a trace"


async def test_a_share_of_the_traces_is_recorded(collector: Collector) -> None:
    async with open_tracer(collector.url, sample=0.0, service="s", instance="i") as tracer:
        own = tracer.begin("own", kind="internal")
        own.end()
        asked = tracer.begin("asked", kind="internal", parent=PARENT)
        asked.child("part", 1.0, 2.0)
        asked.child("never began", None, 2.0)
        asked.end(error="broken")
    assert not int(own.traceparent[-2:], 16) & 1, "those behind it record nothing either"
    assert [span.name for _, span in collector.spans] == ["part", "asked"]
    part, last = (span for _, span in collector.spans)
    assert part.end_time_unix_nano - part.start_time_unix_nano == 1_000_000_000
    assert value_of(last, "error.type") == "broken" and last.status.code == 2


async def test_long_texts_are_cut(collector: Collector) -> None:
    """Jobs may come from anywhere, and thousands of spans wait to be sent."""
    async with open_tracer(collector.url, sample=1.0, service="s", instance="i") as tracer:
        tracer.begin("x", kind="internal", attributes={"a": "b" * 100_000}).end(error="c" * 10_000)
    ((_, span),) = collector.spans
    assert max(len(pair.value.string_value) for pair in span.attributes) == MOST_CHARACTERS


async def test_without_a_collector_contexts_are_handed_on() -> None:
    async with open_tracer("", sample=1.0, service="s", instance="i") as tracer:
        assert tracer.begin("x", kind="server", parent=PARENT).traceparent == PARENT


@pytest.mark.parametrize(
    "parent", ["0" * 200, "00-aa", f"{PARENT}\r\nNats-Rollup: all", f"{PARENT}\xe9"]
)
async def test_what_is_no_context_is_not_handed_on(parent: str) -> None:
    async with open_tracer("", sample=1.0, service="s", instance="i") as tracer:
        assert tracer.begin("x", kind="server", parent=parent).traceparent == ""


async def test_a_context_of_any_length_breaks_no_connection(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """It is sent within a job and as a header, for which a message has little room."""
    async with sim_stack(nats_url, redis_url, tmp_path) as stack:
        await stack.start()
        headers = {"traceparent": "0" * 60_000}
        body = stack.body("x " * 490_000)
        answer = await stack.http.post(CHAT, json=body, headers=headers)
        assert answer.status_code == 400, answer.text
        assert "tokens" in answer.text


@pytest.mark.slow
async def test_a_collector_that_hangs_holds_up_no_end() -> None:
    async def work() -> None:
        async with open_tracer(url, sample=1.0, service="s", instance="i") as tracer:
            for _ in range(1000):  # two batches
                tracer.begin("x", kind="internal").end()

    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        began = time.monotonic()
        await asyncio.to_thread(asyncio.run, work())
        assert CLOSE_S <= time.monotonic() - began < CLOSE_S + 1.5


async def test_missing_packages_are_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UnavailableError, match=r"install `epdflow\[tracing\]`"):
        async with open_tracer("http://127.0.0.1:1", sample=1.0, service="s", instance="i"):
            pass
