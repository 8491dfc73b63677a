"""An OpenAI-compatible server whose answers, and their times, a test writes down beforehand."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

DONE = b"data: [DONE]\n\n"


def event(content: str | None, **fields: Any) -> bytes:
    """One chunk of a chat; without a content it opens the answer."""
    delta = {"role": "assistant", "content": ""} if content is None else {"content": content}
    return (
        b"data: "
        + json.dumps({"choices": [{"index": 0, "delta": delta}], **fields}).encode()
        + b"\n\n"
    )


def usage(prompt: int, completion: int) -> bytes:
    told = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: " + json.dumps({"choices": [], "usage": told}).encode() + b"\n\n"


@dataclass(slots=True)
class Script:
    """What is answered: bytes are written, seconds waited for, ``None`` cuts the connection."""

    steps: list[bytes | float | None] = field(default_factory=list)
    status: int = 200


def tokens(count: int, *, first_s: float, each_s: float, with_usage: bool = True) -> Script:
    """An answer of so many tokens, at these times."""
    script = Script([first_s, event(None) + event("a")])
    for _ in range(count - 1):
        script.steps += [each_s, event(" b")]
    script.steps += [usage(7, count)] if with_usage else []
    script.steps.append(DONE)
    return script


@dataclass(slots=True)
class ScriptedServer:
    """Made by :func:`scripted_server`; ``bodies`` are those that came."""

    answer: Callable[[dict[str, Any]], Script]
    models: list[str] = field(default_factory=lambda: ["m"])
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    open_now: int = 0
    most_open: int = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        script = self.answer(body)
        if script.status != 200:
            data = b"".join(step for step in script.steps if isinstance(step, bytes))
            return web.Response(status=script.status, body=data)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            await response.prepare(request)
            for step in script.steps:
                if step is None:
                    assert request.transport is not None
                    request.transport.abort()
                    break
                if isinstance(step, bytes):
                    await response.write(step)
                else:
                    await asyncio.sleep(step)
        finally:
            self.open_now -= 1
        return response

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})


@contextlib.asynccontextmanager
async def scripted_server(
    answer: Callable[[dict[str, Any]], Script],
) -> AsyncIterator[ScriptedServer]:
    """A server on a free port.

    Args:
        answer: Gives the script for a body.
    """
    server = ScriptedServer(answer)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_get("/v1/models", server.list_models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()
