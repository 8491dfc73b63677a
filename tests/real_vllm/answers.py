"""Asking a server and keeping of its answer what two servers must have in common."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from epd_common.client import CHAT


@dataclass(slots=True)
class Tokens:
    """An answer token by token."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)


async def ask(
    url: str,
    model: str,
    messages: list[dict[str, Any]],
    *,
    stream: bool,
    max_tokens: int = 24,
    **options: Any,
) -> Tokens:
    """One chat request at temperature 0, with token ids and log-probabilities."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": True,
        "return_token_ids": True,
        **options,
    }
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        if not stream:
            response = await client.post(CHAT, json=body)
            assert response.status_code == 200, response.text
            answer = response.json()
            tokens = Tokens(headers=response.headers)
            tokens.prompt_tokens = answer["usage"]["prompt_tokens"]
            choice = answer["choices"][0]
            _take(tokens, choice, choice["message"]["content"])
            return tokens
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200, await response.aread()
            tokens = Tokens(headers=response.headers)
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take_chunk(tokens, json.loads(line[6:]))
            return tokens


def _take_chunk(tokens: Tokens, chunk: dict[str, Any]) -> None:
    assert "error" not in chunk, chunk
    if chunk.get("usage"):
        tokens.prompt_tokens = chunk["usage"]["prompt_tokens"]
    for choice in chunk["choices"]:
        _take(tokens, choice, choice["delta"].get("content") or "")


def _take(tokens: Tokens, choice: dict[str, Any], text: str) -> None:
    tokens.text += text
    tokens.ids += choice.get("token_ids") or []
    content = (choice.get("logprobs") or {}).get("content") or []
    tokens.logprobs += [entry["logprob"] for entry in content]
    tokens.finish_reason = choice.get("finish_reason") or tokens.finish_reason
