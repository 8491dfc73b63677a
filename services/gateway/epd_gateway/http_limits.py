"""What a connection may send before anybody has looked at it, and how slowly.

uvicorn bounds none of it with this parser. A request's head has a size, a number of headers and a time; its
body has a time where it is read (``bodies``). Who was answered before the end of his request may finish it
for a moment, as a connection that is closed upon unread data can take the answer with it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from epd_common.errors import (
    BadRequestError,
    EpdError,
    HeadTooLargeError,
    RequestTimeoutError,
    openai_body,
)

MAX_HEAD_BYTES = 64 * 1024
"""Of the request line and all headers."""

MAX_HEADERS = 100

HEAD_S = 10.0
"""Seconds from the opening of a connection, or the first byte of a further request, to its head's end."""

LINGER_S = 2.0
"""Seconds that the rest of a request is read and thrown away after its answer."""

_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
}


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol with these bounds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._in_message = False
        self._head_bytes = 0
        self._refused: EpdError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused is not None or self.transport.is_closing():
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
        self._in_message = True
        self._head_size = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            raise _head_too_large()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
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
        if self._in_message and not self._in_head and not self.transport.is_closing():
            self._start_timer(LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser does not take; its callbacks' errors come here too."""
        self._refuse(
            _head_too_large()
            if self._too_much
            else BadRequestError("this is no HTTP request that can be read", code="invalid_http")
        )

    @property
    def _too_much(self) -> bool:
        headers = self.headers or ()
        return self._head_size > MAX_HEAD_BYTES or len(headers) >= MAX_HEADERS

    _head_size = 0

    def _count(self, size: int) -> None:
        self._head_size += size
        if self._head_size > MAX_HEAD_BYTES:
            raise _head_too_large()

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
        cycle = self.cycle
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
