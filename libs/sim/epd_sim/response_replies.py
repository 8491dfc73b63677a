"""Answers of ``/v1/responses`` as vLLM writes them: one object, or typed and numbered events."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from epd_sim.parameters import Parameters
from epd_sim.replies import Usage

_PLACE = {"output_index": 0, "content_index": 0}


class ResponseReplies:
    """Writes the answer to one request, which has one output item: a message of one text.

    Args:
        body: The request's.
    """

    def __init__(self, request_id: str, body: dict[str, Any], parameters: Parameters) -> None:
        self._number = 0
        self._item = f"msg_{request_id}"
        self._response = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body["model"],
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "max_output_tokens": parameters.limit,
            "temperature": parameters.temperature,
            "top_p": parameters.top_p,
            "parallel_tool_calls": True,
            "tool_choice": "none",
            "tools": [],
            "background": False,
        }

    def whole(self, texts: list[tuple[str, str]], usage: Usage) -> bytes:
        return msgspec.json.encode(self._ended(texts, usage))

    def opening(self, index: int) -> bytes:
        begun = {**self._response, "status": "in_progress", "output": [], "usage": None}
        item = self._message("in_progress", None)
        return b"".join(
            (
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._text_place, part=_text("")),
            )
        )

    def piece(self, index: int, text: str, reason: str | None) -> bytes:
        return self._event("response.output_text.delta", **self._text_place, delta=text)

    def closing(
        self, texts: list[tuple[str, str]], usage: Usage, *, include_usage: bool
    ) -> list[bytes]:
        ((text, _),) = texts
        done = self._message("completed", text)
        return [
            self._event("response.output_text.done", **self._text_place, text=text),
            self._event("response.content_part.done", **self._text_place, part=_text(text)),
            self._event("response.output_item.done", output_index=0, item=done),
            self._event("response.completed", response=self._ended(texts, usage)),
        ]

    @property
    def _text_place(self) -> dict[str, Any]:
        return {"item_id": self._item, **_PLACE}

    def _ended(self, texts: list[tuple[str, str]], usage: Usage) -> dict[str, Any]:
        ((text, reason),) = texts
        cut = reason == "length"
        tokens = usage.fields()
        return {
            **self._response,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._message("completed", text)],
            "usage": {
                "input_tokens": tokens["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": tokens["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tokens["total_tokens"],
            },
        }

    def _message(self, status: str, text: str | None) -> dict[str, Any]:
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if text is None else [_text(text)],
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
