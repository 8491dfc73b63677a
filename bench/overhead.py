"""What gateway, bus and PD service add to the engine: one run, both ways in turn, same engine.

A PD service runs in this process, so that its engine can be called directly (vLLM's OpenAI application
over ASGI, as the service itself does) between requests that go the whole way: HTTP to the gateway, NATS,
the service, and back. The embedding of the warm image is pinned for the direct calls.

The whole way is counted from the first byte of a request, which was encoded before, to the last byte of its
answer, over one connection that stays open. The client does no more than that, as it shares its process with
the PD service and the engine's front: what a client library takes is not this project's.

    python -m bench.overhead [--requests 200] [--model models/shapes-qwen2vl] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from epd_cli.brokers import embedded_brokers
from epd_cli.processes import ServiceProcess
from epd_common.bus import Bus, Registry
from epd_common.client import CHAT
from epd_common.engines import AnswerHead, Placeholder
from epd_common.store import Arena
from epd_common.store.arena import map_embedding
from epd_pd.service import PdService
from epd_pd.settings import PdSettings
from epd_vllm.engine import EngineOptions
from epd_vllm.pd_engine import VllmPdEngine
from models import shapes

WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Rig:
    """What both ways of asking need."""

    engine: VllmPdEngine
    pins: Path
    client: PlainClient
    model: str


@dataclass(frozen=True, slots=True)
class PlainClient:
    """One connection on which requests are sent in turn."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def post(self, path: str, body: bytes) -> bytes:
        """The body of the answer.

        Raises:
            RuntimeError: it is another one than 200.
        """
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        self.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        head_told = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        size = int(head_told.partition(b"content-length:")[2].partition(b"\r\n")[0])
        answer = await self.reader.readexactly(size)
        if not head_told.startswith(b"http/1.1 200"):
            raise RuntimeError(answer.decode())
        return answer


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--model", default="models/shapes-qwen2vl")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    async with rig(arguments.model) as ready:
        results = {
            "text only": await measure(ready, text_body(ready.model), arguments.requests),
            "one warm image": await measure(ready, image_body(ready.model), arguments.requests),
        }
    report = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
        "requests": arguments.requests,
        "concurrency": 1,
        "unit": "ms",
        "results": results,
    }
    print(json.dumps(report, indent=1))
    if arguments.json:
        await asyncio.to_thread(arguments.json.write_text, json.dumps(report, indent=1))
    return 0


def text_body(model: str) -> dict[str, Any]:
    return _body(model, [{"type": "text", "text": "How many images are there?"}])


def image_body(model: str) -> dict[str, Any]:
    rng = random.Random(3)
    uri = shapes.data_uri(shapes.draw(shapes.random_scene(rng), 224, 224, rng))
    image = {"type": "image_url", "image_url": {"url": uri}}
    return _body(model, [image, {"type": "text", "text": "What is in image #1?"}])


def _body(model: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}


async def measure(rig: Rig, body: dict[str, Any], requests: int) -> dict[str, Any]:
    """Both ways in turn; times in ms, and what the whole way adds to the engine alone."""

    encoded = json.dumps(body).encode()

    async def whole() -> None:
        await rig.client.post(CHAT, encoded)

    await whole()  # encoded once, if it has an image
    content = body["messages"][0]["content"]
    direct = DirectCall(rig, body)
    if content[0]["type"] == "image_url":
        data = (rig.pins.parent.parent / "data").iterdir()
        direct.pin(max(data, key=lambda path: path.stat().st_mtime_ns))
    times: dict[str, list[float]] = {"direct": [], "whole": []}
    for number in range(WARM_UP + requests):
        for name, call in (("direct", direct.call), ("whole", whole)):
            started = time.perf_counter()
            await call()
            if number >= WARM_UP:
                times[name].append((time.perf_counter() - started) * 1e3)
        if number % 50 == 0:
            print(f"  {number} of {WARM_UP + requests}", file=sys.stderr)
    shown = {name: _quantiles(values) for name, values in times.items()}
    added = {q: round(shown["whole"][q] - shown["direct"][q], 2) for q in ("p50", "p99")}
    return shown | {"added": added}


@dataclass(slots=True)
class DirectCall:
    """Calls the engine alone, with the image's embedding pinned under a key of its own.

    The service unpins its key after each request; under the same key the two ways would disturb each other.
    """

    rig: Rig
    body: dict[str, Any]
    placeholders: list[Placeholder] = field(default_factory=list)
    number: int = 0

    def pin(self, published: Path) -> None:
        key = hashlib.sha256(published.name.encode()).hexdigest()
        pinned = self.rig.pins / key
        pinned.hardlink_to(published)
        embedding = map_embedding(pinned)
        assert embedding is not None
        self.placeholders = [Placeholder(key, "image", embedding.header.metadata)]

    async def call(self) -> None:
        self.number += 1
        content = list(self.body["messages"][0]["content"])
        if self.placeholders:
            content[0] = {"type": "media_ref", "item": 0}
        body = self.body | {"messages": [{"role": "user", "content": content}]}
        answer = self.rig.engine.answer(f"direct-{self.number}", CHAT, body, self.placeholders)
        async with contextlib.aclosing(answer):
            async for part in answer:
                if isinstance(part, AnswerHead) and part.status != 200:
                    raise RuntimeError(f"the engine answered {part.status}")


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 2),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 2),
        "mean": round(statistics.fmean(ordered), 2),
    }


@contextlib.asynccontextmanager
async def rig(model: str) -> AsyncIterator[Rig]:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-bench-")))
        arena = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-", dir="/dev/shm"))
        )
        brokers = await stack.enter_async_context(embedded_brokers(folder / "brokers"))
        name = Path(model).name
        environment = {
            "EPD_NATS_URL": brokers.nats_url,
            "EPD_REDIS_URL": brokers.redis_url,
            "EPD_MODEL": model,
            "EPD_SERVED_MODEL": name,
            "EPD_PORT": "0",
            "EPD_ARENA_DIR": str(arena),
            "EPD_STORES": "arena",
            "EPD_NODE": "bench",
        }
        for role in ("gateway", "encoder"):
            service = ServiceProcess(role, f"{role}-1", environment, folder / f"{role}.log")
            stack.push_async_callback(service.stop)
            await service.start()
        os.environ.update(environment)
        settings = PdSettings(worker_id="pd-1")
        engines: list[VllmPdEngine] = []

        def make_engine(arena: Arena) -> VllmPdEngine:
            engine = VllmPdEngine(
                EngineOptions(model=model, served=name, max_batch=settings.max_num_seqs),
                arena=arena,
                max_items=settings.max_items,
            )
            engines.append(engine)
            return engine

        stop = asyncio.Event()
        serving = asyncio.create_task(PdService(settings, make_engine).run(stop), name="pd")
        stack.push_async_callback(_end, stop, serving)
        bus = await stack.enter_async_context(Bus(brokers.nats_url, name="bench"))
        registry = await stack.enter_async_context(Registry(bus))
        print("loading the engines", file=sys.stderr)
        async with asyncio.timeout(600):
            while sum(view.ready for view in registry.workers()) < 3:
                if serving.done():
                    await serving
                await asyncio.sleep(0.2)
        url = next(view.record.phase for view in registry.workers("gateway"))
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        stack.callback(writer.close)
        client = PlainClient(reader, writer)
        yield Rig(engines[0], arena / "pins" / "pd-1", client, name)


async def _end(stop: asyncio.Event, serving: asyncio.Task[None]) -> None:
    stop.set()
    await serving


if __name__ == "__main__":
    import uvloop

    sys.exit(uvloop.run(main()))
