"""Asks a PD engine, resets its prefix cache, fills it with other prompts; prints what it kept as JSON.

    python kept_rig.py MODEL FOLDER

A program of its own, so that vLLM runs as it does in the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from bench.engine_rig import say
from epd_common.beginnings import beginnings_of
from epd_common.engines import AnswerHead
from epd_common.ingest.body import CHAT
from epd_common.store import Arena
from epd_vllm.engine import EngineOptions
from epd_vllm.pd_engine import VllmPdEngine

LITTLE = "--max-model-len 1024 --num-gpu-blocks-override 10"
SETTLE_S = 5.0
SYSTEM = {"role": "system", "content": "the quick brown fox. " * 55}
TURNS = [SYSTEM, {"role": "user", "content": "what is it?"}]
LATER = [
    *TURNS,
    {"role": "assistant", "content": "a cat"},
    {"role": "user", "content": "so? " * 20},
]


class Rig:
    def __init__(self, engine: VllmPdEngine) -> None:
        self._engine = engine

    async def ask(self, messages: list[dict[str, Any]], *, told: bool = True) -> dict[str, Any]:
        """Which of a request's beginnings are kept after it, by their places; and which others are."""
        body = {"model": "rig", "messages": messages, "max_tokens": 4, "n": 2, "temperature": 1}
        named = beginnings_of(CHAT, body, [])
        answer = self._engine.answer(
            f"r{id(named)}", CHAT, body, [], beginnings=named if told else ()
        )
        async with contextlib.aclosing(answer):
            async for part in answer:
                assert not isinstance(part, AnswerHead) or part.status == 200
        await self.settled()
        keys = [beginning.key for beginning in named]
        kept = self._engine.kept.keys
        return {"kept": [key in kept for key in keys], "others": len(kept - set(keys))}

    async def settled(self) -> None:
        """Return when nothing comes through the pipe any more."""
        changed = asyncio.Event()
        self._engine.kept.changed = changed.set
        while True:
            changed.clear()
            try:
                await asyncio.wait_for(changed.wait(), 0.3)
            except TimeoutError:
                return


async def main(model: str, folder: Path) -> None:
    arena = Arena(folder / "arena", quota_bytes=1 << 28, worker="kept-rig")
    arena.open()
    engine = VllmPdEngine(
        EngineOptions(model=model, served="rig", max_batch=4, extra_arguments=LITTLE),
        arena=arena,
        max_items=4,
        kv_events=True,
    )
    found: dict[str, Any] = {}
    try:
        await engine.start(say)
        rig = Rig(engine)
        found["first"] = await rig.ask(TURNS)
        found["later"] = await rig.ask(LATER)
        assert await engine.reset_prefix_cache()
        await rig.settled()
        found["reset"] = len(engine.kept.keys)
        found["untold"] = await rig.ask(TURNS, told=False)
        found["again"] = await rig.ask(TURNS)
        for number in range(3):
            other = [{"role": "user", "content": f"{number} other things happen. " * 45}]
            found["other"] = await rig.ask(other)
        print("RESULTS " + json.dumps(found))
    finally:
        await engine.stop()
        arena.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
