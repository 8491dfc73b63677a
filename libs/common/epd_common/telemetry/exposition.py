"""``/metrics`` of a worker: a tiny HTTP server in the worker's own event loop, for Prometheus alone.

In the loop, since what is shown is kept by the loop's tasks: a server in a thread would read dictionaries
while they change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Metric,
    generate_latest,
)
from prometheus_client.registry import Collector

from epd_common.errors import UnavailableError

logger = logging.getLogger(__name__)

REQUEST_S = 5.0
MOST_HEAD_BYTES = 8192
MOST_CONNECTIONS = 16
"""Scrapers are few, and ask at once; beyond that the one who came first is let go."""


@contextlib.asynccontextmanager
async def serving_metrics(
    registry: CollectorRegistry, *, host: str, port: int
) -> AsyncIterator[int]:
    """Serve a registry while the context is open; the port, which is a free one where 0 was asked for.

    Raises:
        UnavailableError: nobody can listen there.
    """
    page = _Page(registry)
    try:
        server = await asyncio.start_server(page.answer, host, port, limit=MOST_HEAD_BYTES)
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {host}:{port} for metrics ({error.strerror or error}); set EPD_METRICS_HOST "
            "and EPD_METRICS_PORT (0 serves none), each worker of a host with a port of its own"
        ) from error
    bound: int = server.sockets[0].getsockname()[1]
    logger.info("metrics at http://%s:%d/metrics", host, bound)
    try:
        yield bound
    finally:
        server.close()
        page.close()


class EngineMetrics(Collector):
    """vLLM's own metrics of this process, which it registers with the client library's default registry."""

    def collect(self) -> list[Metric]:
        return [family for family in REGISTRY.collect() if family.name.startswith("vllm:")]

    def describe(self) -> list[Metric]:
        return []


class _Page:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._open: dict[asyncio.StreamWriter, None] = {}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MOST_CONNECTIONS:
            first = next(iter(self._open))
            del self._open[first]
            first.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head.decode("latin-1")))
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # a client that does not ask, or does not read
        except Exception:
            logger.exception("metrics could not be collected")
        finally:
            self._open.pop(writer, None)
            # What was not read by now is thrown away; closing would wait for the client without end.
            writer.transport.abort()

    def close(self) -> None:
        """End the connections that are open."""
        for writer in list(self._open):
            writer.transport.abort()

    def _response(self, head: str) -> bytes:
        method, _, rest = head.partition("\r\n")[0].partition(" ")
        if rest.partition(" ")[0].partition("?")[0] != "/metrics":
            return _http("404 Not Found", "text/plain", b"only /metrics is here\n")
        if method != "GET":
            return _http("405 Method Not Allowed", "text/plain", b"only GET is served\n")
        return _http("200 OK", CONTENT_TYPE_LATEST, generate_latest(self._registry))


def _http(status: str, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body
