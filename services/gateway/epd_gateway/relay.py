"""From reply frames to an HTTP response, and from a client's disconnect to a cancel.

Nothing is sent to the client before the head of the answer is there, so a failure up to then has its own
status. A JSON answer is sent when it is whole, for the same reason. In a stream that has begun, a failure
is an error event, as its route has them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from epd_common.accounts import Entry
from epd_common.errors import (
    BusyError,
    EpdError,
    UnavailableError,
    from_status,
    openai_body,
)
from epd_common.protocol import ReplyHead
from epd_common.replies import EVENT_STREAM
from epd_common.requester import SentRequest
from epd_common.tasks import end
from epd_common.telemetry.traces import Span
from epd_gateway import spans
from epd_gateway.metrics import GatewayMetrics
from epd_gateway.stream_end import StreamEnd
from epd_gateway.trails import Trail

logger = logging.getLogger(__name__)

CLIENT_GONE = 499

RECEIPT = "x-epd-receipt"
"""Header that says how an answer came about, where the request's header ``x-epd-explain`` asks for it."""


class Relay(Response):
    """Submits a request and relays its reply.

    Args:
        send: The request, not yet submitted.
        trail: What becomes of it.
        span: Ends with it.
        explain: Whether an answer that is not streamed says how it came about.
        entry: The request in the gateway's accounts.
        started: When it arrived, by the monotonic clock.
        timeout_s: All that sending may take; a client that stops to read is not waited for longer.
    """

    def __init__(
        self,
        *,
        send: AbstractAsyncContextManager[SentRequest],
        trail: Trail,
        span: Span,
        explain: bool,
        entry: Entry,
        metrics: GatewayMetrics,
        route: str,
        started: float,
        timeout_s: float,
    ) -> None:
        self._request = send
        self._trail = trail
        self._span = span
        self._explain = explain
        self._entry = entry
        self._metrics = metrics
        self._route = route
        self._started = started
        self._timeout_s = timeout_s
        self._status = CLIENT_GONE
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        relaying = asyncio.ensure_future(self._relay(scope, receive, send))
        watching = asyncio.ensure_future(_client_gone(receive))
        try:
            await asyncio.wait(
                (relaying, watching),
                timeout=self._timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            try:
                await end(relaying, watching)
            finally:  # also where this is cancelled a second time
                if relaying.done() and not relaying.cancelled() and relaying.exception():
                    self._status = EpdError.status
                # A stream that is cut off had its status before.
                ended = "cancelled" if relaying.cancelled() else outcome(self._status)
                self._entry.end(ended)
                self._trail.end(self._status, ended)
                spans.end(self._span, self._trail)
                self._metrics.requests.labels(self._route, self._status).inc()
                self._metrics.duration.labels(self._route).observe(time.monotonic() - self._started)
        if not relaying.cancelled():
            relaying.result()

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._request as sent:
                self._trail.sent(sent)
                for origin in sent.origins:
                    self._metrics.items.labels(origin).inc()
                head = await sent.reply.head()
                headers = _headers(sent, head)
                if head.content_type.startswith(EVENT_STREAM):
                    await self._stream(sent, head, headers, send)
                    return
                body = b"".join([piece async for piece in sent.reply.data()])
        except EpdError as error:
            self._status = error.status
            self._trail.failed(error)
            logger.log(
                logging.WARNING if error.status >= 500 else logging.INFO,
                "request ended with %d: %s",
                error.status,
                error,
                extra={"request_id": self._trail.request_id, **error.fields()},
            )
            answer = JSONResponse(
                openai_body(error), status_code=error.status, headers=error.headers()
            )
            await answer(scope, receive, send)
            return
        self._status = head.status
        self._trail.first()
        self._metrics.ttft.labels(self._route).observe(time.monotonic() - self._started)
        if self._explain:
            self._trail.end(self._status, outcome(self._status))
            headers[RECEIPT] = self._trail.short()
        whole = Response(body, head.status, headers, head.content_type)
        await whole(scope, receive, send)

    async def _stream(
        self, sent: SentRequest, head: ReplyHead, headers: dict[str, str], send: Send
    ) -> None:
        headers |= {"content-type": head.content_type, "cache-control": "no-cache"}
        await send(_start(head.status, headers))
        self._status = head.status
        first = True
        ended = StreamEnd(self._route)
        try:
            async for piece in sent.reply.data():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                ended.saw(piece)
                if first:
                    self._trail.first()
                    self._metrics.ttft.labels(self._route).observe(time.monotonic() - self._started)
                    first = False
        except EpdError as error:
            self._status = error.status
            self._trail.failed(error)
            logger.warning(
                "stream ended by an error: %s",
                error,
                extra={"request_id": self._trail.request_id, **error.fields()},
            )
            last = ended.by(error)
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def outcome(status: int) -> str:
    """The end of a request in the accounts."""
    if status == CLIENT_GONE:
        return "cancelled"
    return "answered" if status < 400 else "refused" if status < 500 else "failed"


def _headers(sent: SentRequest, head: ReplyHead) -> dict[str, str]:
    """What became of the request, for people and tests who want to see it."""
    headers = {"x-epd-worker": head.worker}
    if sent.origins:
        headers["x-epd-items"] = ",".join(sent.origins)
    if head.status in (BusyError.status, UnavailableError.status):
        headers |= from_status(head.status, "the engine is busy").headers()
    return headers


def _start(status: int, headers: dict[str, str]) -> Message:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
