"""What a connection may send before anybody has looked at it, and how slowly.

uvicorn bounds none of it with this parser. A request's head has a size, a number of headers and a time; its
body has a time where it is read (``bodies``). Who was answered before the end of his request may finish it
for a moment, as a connection that is closed upon unread data can take the answer with it.

Requests may be sent before the one before is answered (pipelining). One read can bring thousands of them, and
uvicorn would read on with each answer; here nothing is read while one waits, and few may.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from epd_common.errors import (
    BadRequestError,
    EpdError,
    HeadTooLargeError,
    RequestTimeoutError,
    openai_body,
)

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEAD_BYTES = 64 * 1024
"""Of the request line and all headers."""

MAX_HEADERS = 100

HEAD_S = 10.0
"""Seconds from the opening of a connection, or the first byte of a further request, to its head's end."""

LINGER_S = 2.0
"""Seconds that the rest of a request is read and thrown away after its answer."""

MAX_PIPELINED = 16
"""Requests that wait on one connection behind the one that is being answered. The connection ends with the
last of them if there are more; whoever sent those asks again."""

_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
}


class _Full(Exception):
    """As many requests wait as may."""


class _Flow(FlowControl):
    """uvicorn's, which does not go on to read while something holds it."""

    def __init__(self, transport: asyncio.Transport, held: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._held = held

    def resume_reading(self) -> None:
        if not self._held():
            super().resume_reading()


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol with these bounds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._in_message = False
        self._head_bytes = 0
        self._head_size = 0
        self._fault: EpdError | None = None
        self._full = False
        self._refused: EpdError | None = None
        self._running: RequestResponseCycle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, lambda: self._full or bool(self.pipeline))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._running is not None:
            # uvicorn tells the request that came last, which may be one that still waits.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._full or self._refused is not None or self.transport.is_closing():
            return
        if self._in_head:
            if self._timer is None:
                self._await_head()
            self._head_bytes += len(data)
        super().data_received(data)
        # What came after the head's end counts for the body, so only a head without an end is judged here.
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._full = True
            raise _Full
        self._in_message = True
        self._head_size = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            self._fail(_head_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        # Other upgrades, such as to HTTP/2, are offered by many clients and may be passed over.
        if self.parser.should_upgrade() and self._get_upgrade() == b"websocket":
            self._fail(
                BadRequestError("there are no websockets here", code="upgrade_not_supported")
            )
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._in_message = True, False
        self._head_bytes = 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._in_message and not self._in_head and self.cycle.response_complete:
            self._start_timer(LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser does not take; its callbacks' errors come here too."""
        if self._full:
            self.flow.pause_reading()
            self.cycle.keep_alive = False
        else:
            unreadable = "this is no HTTP request that can be read"
            self._refuse(self._fault or BadRequestError(unreadable, code="invalid_http"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: who offers another protocol is answered in this one."""

    def _count(self, size: int) -> None:
        self._head_size += size
        if self._head_size > MAX_HEAD_BYTES:
            self._fail(_head_too_large())

    def _fail(self, error: EpdError) -> NoReturn:
        """End the parser, from one of its callbacks."""
        self._fault = error
        raise error

    def _await_head(self) -> None:
        late = RequestTimeoutError(f"the request's head did not come within {HEAD_S:g} s")
        self._start_timer(HEAD_S, lambda: self._refuse(late))

    def _start_timer(self, after_s: float, what: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(after_s, what)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: EpdError) -> None:
        """Answer without the application, and close."""
        self._stop_timer()
        if self._refused is not None or self.transport.is_closing():
            return
        self._refused = error
        cycle = self._running
        if cycle is None or cycle.response_complete or not cycle.response_started:
            # Else an answer is on its way.
            if cycle is not None:
                cycle.disconnected = True  # what the application says now would come behind this
            body = json.dumps(openai_body(error)).encode()
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%s"
                % (error.status, _PHRASES[error.status], len(body), body)
            )
        self.transport.close()


def _head_too_large() -> HeadTooLargeError:
    return HeadTooLargeError(
        f"the request's line and headers may have {MAX_HEAD_BYTES} bytes together, in at most "
        f"{MAX_HEADERS} headers"
    )
