"""How a stream that has begun ends by an error: as each route's API says it.

A chat, or a completion, has an event with the error alone and then the end mark. A response's events have
types and numbers, and no end mark.
"""

from __future__ import annotations

import json

from epd_common.errors import EpdError, openai_body
from epd_common.ingest.body import RESPONSES

_SEPARATOR = b"\n\n"


class StreamEnd:
    """Follows a stream, as the number of its last event counts on from those before."""

    def __init__(self, route: str) -> None:
        self._numbered = route == RESPONSES
        self._events = 0
        self._last = b""

    def saw(self, piece: bytes) -> None:
        """A piece of the stream was sent; an event may be cut anywhere."""
        if self._numbered:
            seen = self._last + piece
            self._events += seen.count(_SEPARATOR)
            self._last = seen.rpartition(_SEPARATOR)[2][-1:]

    def by(self, error: EpdError) -> bytes:
        """The last bytes of a stream that ends by this error."""
        told = openai_body(error)
        if not self._numbered:
            return f"data: {json.dumps(told)}\n\ndata: [DONE]\n\n".encode()
        # What is left of a broken event is not made part of this one.
        cut = _SEPARATOR if self._last else b""
        event = {
            "type": "error",
            "sequence_number": self._events,
            **{name: told["error"].get(name) for name in ("code", "message", "param")},
        }
        return cut + f"event: error\ndata: {json.dumps(event)}\n\n".encode()
