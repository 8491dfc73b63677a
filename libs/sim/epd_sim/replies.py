"""Answers in OpenAI's shape, as vLLM writes them: whole, or as server-sent events.

Those of ``/v1/responses`` are in :mod:`epd_sim.response_replies`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

STREAM_TYPE = "text/event-stream; charset=utf-8"
JSON_TYPE = "application/json"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: of its prompts once each, of these that were cached, of all its answers."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def fields(self) -> dict[str, Any]:
        cached = {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            **(cached if self.cached_tokens else {}),
        }


class Replies(Protocol):
    """Writes the answer to one request."""

    def whole(self, texts: list[tuple[str, str]], usage: Usage) -> bytes:
        """An answer that is no stream: the text and the finish reason of each choice."""

    def opening(self, index: int) -> bytes:
        """The events before the first text of a choice."""

    def piece(self, index: int, text: str, reason: str | None) -> bytes:
        """More text of a choice; with a reason it is the last."""

    def closing(
        self, texts: list[tuple[str, str]], usage: Usage, *, include_usage: bool
    ) -> list[bytes]:
        """The events behind all text, with the whole of it."""


class ChoiceReplies:
    """Answers to a chat, or to a completion.

    Args:
        chat: Whether it is a chat, else a completion.
    """

    def __init__(self, request_id: str, model: str, *, chat: bool) -> None:
        self._chat = chat
        self._common = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, texts: list[tuple[str, str]], usage: Usage) -> bytes:
        choices = [
            {
                "index": index,
                **(
                    {"message": {"role": "assistant", "content": text}}
                    if self._chat
                    else {"text": text}
                ),
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate(texts)
        ]
        kind = "chat.completion" if self._chat else "text_completion"
        return msgspec.json.encode(
            {**self._common, "object": kind, "choices": choices, "usage": usage.fields()}
        )

    def opening(self, index: int) -> bytes:
        if not self._chat:
            return b""  # completions have none
        return self._event([_choice(index, {"delta": {"role": "assistant", "content": ""}}, None)])

    def piece(self, index: int, text: str, reason: str | None) -> bytes:
        content = {"delta": {"content": text}} if self._chat else {"text": text}
        return self._event([_choice(index, content, reason)])

    def closing(
        self, texts: list[tuple[str, str]], usage: Usage, *, include_usage: bool
    ) -> list[bytes]:
        asked = [self._event([], usage=usage.fields())] if include_usage else []
        return [*asked, DONE]

    def _event(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        chunk = {**self._common, "object": kind, "choices": choices, **fields}
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """An error as vLLM writes it."""
    kind = "BadRequestError" if status == 400 else "InternalServerError"
    error = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": error})


def _choice(index: int, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}
