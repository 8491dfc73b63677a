"""Server-sent events looked at in passing: which come, when, and how the stream ends.

Events are decoded until the first one with a token, and at the end the last few; what lies between is only
counted, as decoding it all would cost the client more than the server takes to make it.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from typing import Any

_TAIL_BYTES = 16 << 10
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """How a stream ended: with what error, if any, and what it said of its tokens (-1: nothing)."""

    error: str = ""
    prompt_tokens: int = -1
    completion_tokens: int = -1


class StreamWatch:
    """Follows one stream.

    Attributes:
        first_token_at: When the first event with a token came; 0 before that.
        last_token_at: When the last one came.
        gaps_s: Seconds between reads that brought tokens; several tokens may have come in one.
        events: Events with tokens, by count.
    """

    def __init__(self) -> None:
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self.gaps_s = array("f")
        self.events = 0
        self._tail = b""

    def feed(self, data: bytes, at: float) -> None:
        """Bytes came at a time of the monotonic clock."""
        if self.first_token_at:
            tokens = _count(data)
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            if tokens:
                self.gaps_s.append(at - self.last_token_at)
                self.last_token_at = at
                self.events += tokens
            return
        self._tail += data
        whole, _, _ = self._tail.rpartition(b"\n")
        if (found := sum(map(_has_token, _events(whole)))) > 0:
            self.first_token_at = self.last_token_at = at
            self.events = found

    def end(self) -> StreamEnd:
        """The stream is over; read its last events."""
        events = _events(self._tail)
        error = "" if events and events[-1] == _DONE else "stream_without_end"
        prompt = completion = -1
        for event in events[-4:]:
            try:
                chunk = json.loads(event)
            except ValueError:
                continue  # the end mark, or half of what the tail begins with
            if not isinstance(chunk, dict):
                continue
            if isinstance(chunk.get("error"), dict):
                error = f"stream_error {error_code(chunk)}"
            if isinstance(usage := chunk.get("usage"), dict):
                prompt = int(usage.get("prompt_tokens", -1))
                completion = int(usage.get("completion_tokens", -1))
        if not error and not self.first_token_at:
            error = "stream_without_tokens"
        return StreamEnd(error, prompt, completion)


def error_code(body: Any) -> str:
    """The code of an error body in OpenAI's shape, as far as it is one."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return ""
    return str(error.get("code") or error.get("type") or "")


def _events(data: bytes) -> list[bytes]:
    lines = data.replace(b"\r\n", b"\n").split(b"\n")
    return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def _count(data: bytes) -> int:
    """Events that begin in ``data`` and bring tokens, by what they look like."""
    others = data.count(_DONE) + data.count(b'"choices":[]') + data.count(b'"choices": []')
    return max(0, data.count(b"data:") - others)


def _has_token(event: bytes) -> bool:
    try:
        choices = json.loads(event).get("choices")
    except (ValueError, AttributeError):
        return False
    for choice in choices or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(value for name, value in delta.items() if name != "role"):
            return True
    return False
