"""Streams whose worker is lost in the middle, and long questions to have some."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from cases import picture, text, user
from deployment import Deployment
from services import health

from epd_cli.processes import ServiceProcess
from epd_common.client import CHAT
from models import shapes

Lose = Callable[[ServiceProcess], None]

PICTURES = 6
MOST_TOKENS = 400


@dataclass(slots=True)
class Streamed:
    """What a client saw of a stream."""

    worker: str = ""
    text: str = ""
    finish: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    names: set[tuple[str, int]] = field(default_factory=set)
    """Id and time of its chunks."""
    chunks: int = 0


async def stream(
    deployment: Deployment,
    body: dict[str, Any],
    route: str = CHAT,
    lose: Lose | None = None,
    after: int = 5,
) -> Streamed:
    """Read a stream; after some chunks ``lose`` its worker."""
    seen = Streamed()
    asked = {"model": deployment.name, "stream": True, "temperature": 0, **body}
    asked["stream_options"] = {"include_usage": True}
    async with (
        httpx.AsyncClient(base_url=deployment.url, timeout=120) as client,
        client.stream("POST", route, json=asked) as response,
    ):
        assert response.status_code == 200, await response.aread()
        seen.worker = response.headers["x-epd-worker"]
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                take(seen, json.loads(line[6:]))
                if lose is not None and seen.chunks == after:
                    lose(service(deployment, seen.worker))
    return seen


def take(seen: Streamed, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        seen.error = chunk["error"]
        return
    seen.chunks += 1
    seen.names.add((chunk["id"], chunk["created"]))
    seen.usage = chunk.get("usage") or seen.usage
    for choice in chunk["choices"]:
        delta = choice.get("delta") or {"content": choice.get("text")}
        seen.text += delta.get("content") or ""
        seen.finish = choice["finish_reason"] or seen.finish


def service(deployment: Deployment, worker: str) -> ServiceProcess:
    return next(s for s in deployment.stack.services if s.worker_id == worker)


def kill(pd: ServiceProcess) -> None:
    pd.signal(signal.SIGKILL)


def kill_engine(pd: ServiceProcess) -> None:
    """The engine's process alone; its service lives."""
    for child in psutil.Process(pd.pid).children(recursive=True):
        child.kill()


def freeze(pd: ServiceProcess) -> None:
    pd.signal(signal.SIGSTOP)


async def back(deployment: Deployment, worker: str, how: Lose) -> None:
    """Have a worker again that was lost, and that takes work."""
    pd = service(deployment, worker)
    if how is freeze:
        pd.signal(signal.SIGCONT)
        return
    await asyncio.wait_for(pd.wait(), 60)
    await pd.start()
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(TimeoutError):
                # It answers long before its engine is loaded.
                if (await health(deployment, worker))["ok"]:
                    return
            await asyncio.sleep(0.2)


def long_question(seed: int, **options: Any) -> dict[str, Any]:
    """A question about pictures that nobody has seen, with a long answer."""
    rng = random.Random(seed)
    pictures = [picture(rng) for _ in range(PICTURES)]
    asked = shapes.ask(rng, [scene for scene, _ in pictures], "describe")
    parts = [part for _, part in pictures]
    return {"messages": [user(*parts, text(asked.text))], "max_tokens": MOST_TOKENS, **options}
