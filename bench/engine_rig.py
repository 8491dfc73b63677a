"""A PD engine whose embeddings arrive when a program says so: for measurements, and for tests of the gate.

The embeddings are real: an encoder engine makes them once, and they are kept in a folder. They are pinned
under keys of their own for each request, so that nothing is in the engine's caches.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import random
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.rig_files import FOLDER, STEPS
from epd_common.client import CHAT
from epd_common.engines import AnswerHead, AnswerPiece, Placeholder
from epd_common.store import Arena, EmbeddingHeader
from epd_common.store.arena import map_embedding
from epd_vllm.encoder_engine import VllmEncoderEngine
from epd_vllm.engine import EngineOptions
from epd_vllm.pd_engine import VllmPdEngine
from models import shapes

TEXT = "Look at these pictures, one after the other, and then tell me what you see in them. "


class Rig:
    """One PD engine and a store of real embeddings."""

    def __init__(self, engine: VllmPdEngine, arena: Arena, made: list[Path], folder: Path) -> None:
        self.engine = engine
        self.arena = arena
        self.made = made
        self.folder = folder
        self.steps = folder / STEPS
        self.numbers = iter(range(10**6))

    def keys(self, *pictures: int) -> list[str]:
        """Keys that nobody used before, one for each distinct picture."""
        run = next(self.numbers)
        return [hashlib.sha256(f"{run} {picture}".encode()).hexdigest() for picture in pictures]

    def header(self, picture: int) -> EmbeddingHeader:
        embedding = map_embedding(self.made[picture])
        assert embedding is not None
        return embedding.header

    async def pin(
        self, key: str, picture: int, change: Callable[[bytes], bytes] | None = None
    ) -> None:
        """What the service does when an embedding arrives: the file appears whole, then a wake."""
        data = self.made[picture].read_bytes()
        temporary = self.arena.staging / key
        temporary.write_bytes(change(data) if change else data)
        temporary.rename(self.arena.pins / key)
        await self.engine.wake()

    async def ask(
        self, name: str, keys: Sequence[str], pictures: Sequence[int], **options: Any
    ) -> dict[str, Any]:
        """A request over pictures; ``keys[i]`` stands for ``pictures[i]``."""
        parts: list[dict[str, Any]] = [{"type": "text", "text": TEXT}]
        distinct = list(dict.fromkeys(keys))
        for key in keys:
            parts.append({"type": "media_ref", "item": distinct.index(key)})
        parts.append({"type": "text", "text": "Describe image #1."})
        placeholders = [
            Placeholder(key, "image", self.header(pictures[list(keys).index(key)]).metadata)
            for key in distinct
        ]
        body = {
            "model": "rig",
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": 12,
            "temperature": 0,
            "return_token_ids": True,
            **options,
        }
        return await self.collect(name, body, placeholders)

    async def collect(
        self, name: str, body: dict[str, Any], placeholders: list[Placeholder]
    ) -> dict[str, Any]:
        """Status and token ids of an answer."""
        status, raw = 0, b""
        async with contextlib.aclosing(
            self.engine.answer(name, CHAT, body, placeholders)
        ) as answer:
            async for part in answer:
                if isinstance(part, AnswerHead):
                    status = part.status
                elif isinstance(part, AnswerPiece):
                    raw += part.data
        ids = json.loads(raw)["choices"][0]["token_ids"] if status == 200 else None
        return {"status": status, "ids": ids}

    async def scheduled(self, name: str, steps: int) -> None:
        """Wait until a request has had so many steps."""
        async with asyncio.timeout(20):
            while len(self.steps_of(name)) < steps:  # noqa: ASYNC110 - a file in another process
                await asyncio.sleep(0.005)

    def steps_of(self, name: str) -> list[list[int]]:
        """[tokens computed before, tokens scheduled] of each step of a request's prefill."""
        found = []
        lines = self.steps.read_text().splitlines() if self.steps.exists() else []
        for line in lines:
            for request, step in json.loads(line)["requests"].items():
                if request.startswith(f"chatcmpl-{name}-"):
                    found.append(step)
        return found

    def last_step(self) -> dict[str, Any]:
        """The whole note of the latest step."""
        step: dict[str, Any] = json.loads(self.steps.read_text().splitlines()[-1])
        return step

    def cpu_s(self) -> float:
        """CPU time of the engine's processes so far."""
        children = psutil.Process().children(recursive=True)
        return sum(sum(child.cpu_times()[:2]) for child in children)


@contextlib.asynccontextmanager
async def engine_rig(
    model: str,
    folder: Path,
    *,
    pictures: int,
    side: int,
    seqs: int,
    sleep_when_stalled: bool = True,
    extra: Sequence[str] = (),
) -> AsyncIterator[Rig]:
    """A running engine.

    Args:
        folder: Keeps the embeddings, and is where the scheduler writes its steps.
        pictures: How many embeddings there shall be.
        side: Height of the pictures in px; they are a quarter wider.
        extra: More engine arguments.
    """
    os.environ[FOLDER] = str(folder)
    (folder / STEPS).unlink(missing_ok=True)
    arena = Arena(folder / "arena", quota_bytes=1 << 28, worker=f"rig-{os.getpid()}")
    arena.open()
    try:
        made = await _embeddings(model, folder, arena, pictures, side)
        engine = VllmPdEngine(
            EngineOptions(
                model=model,
                served="rig",
                max_batch=seqs,
                extra_arguments=shlex.join(
                    ["--scheduler-cls", "bench.stepping.SteppingScheduler", *extra]
                ),
            ),
            arena=arena,
            max_items=64,
            sleep_when_stalled=sleep_when_stalled,
        )
        await engine.start(say)
        try:
            yield Rig(engine, arena, made, folder)
        finally:
            await engine.stop()
    finally:
        arena.close()


async def _embeddings(model: str, folder: Path, arena: Arena, count: int, side: int) -> list[Path]:
    """Embeddings of pictures, made by the real encoder the first time."""
    made = [folder / f"{side}-{number}.embedding" for number in range(count)]
    if all(path.exists() for path in made):
        return made
    encoder = VllmEncoderEngine(
        EngineOptions(model=model, served="rig", max_batch=4), staging=arena.staging
    )
    await encoder.start(say)
    rng = random.Random(9)
    for number, path in enumerate(made):
        buffer = io.BytesIO()
        shapes.draw(shapes.random_scene(rng), side, side * 5 // 4, rng).save(buffer, "PNG")
        key = hashlib.sha256(f"{side} {number}".encode()).hexdigest()
        staged = await encoder.encode(key, buffer.getvalue(), "image", {}, _ignore)
        arena.adopt(staged.path, staged.header)
        path.write_bytes((folder / "arena" / "data" / key).read_bytes())
    await encoder.stop()
    return made


async def _ignore(metadata: dict[str, Any]) -> None:
    del metadata


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)
