"""What early admission brings, and what waiting inside the engine costs. Real vLLM, one run.

Time to first token of a request over four pictures of which the last comes late: held outside the engine
until all are there, and let in early, in turn. The engine's CPU while all its requests wait, with the
scheduler that sleeps and with vLLM's polling. And, through all services, the time from an encoder's ``ready``
event to the engine's step that uses the embedding.

    python -m bench.early_prefill [--rounds 20] [--late 0.5] [--side 448] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from nats.aio.msg import Msg

from bench.engine_rig import Rig, engine_rig, say
from bench.rig_files import FOLDER, STEPS
from epd_cli.stack import StackOptions, run_stack
from epd_common.bus import Bus
from epd_common.client import CHAT
from epd_common.protocol import EmbeddingEvent, decode, subjects
from models import shapes

ROOT = Path(__file__).resolve().parents[1]
PICTURES = 4
SEQS = 4
IDLE_S = 5.0
EARLY_TEXT = "Look at this picture closely; there will be a question about it afterwards: "


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--late", type=float, default=0.5, metavar="SECONDS")
    parser.add_argument("--side", type=int, default=448, help="height of the pictures in px")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as name:
        folder = Path(name)
        results = await _measure(folder, arguments.rounds, arguments.late, arguments.side)
    report = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
        "rounds": arguments.rounds,
        **results,
    }
    print(json.dumps(report, indent=1))
    if arguments.json:
        await asyncio.to_thread(arguments.json.write_text, json.dumps(report, indent=1))
    return 0


async def _measure(folder: Path, rounds: int, late_s: float, side: int) -> dict[str, Any]:
    model = folder / "qwen2_5_vl"  # random, with room for large pictures
    command = ("-m", "models.tiny", "--arch", "qwen2_5_vl", "--out", str(model))
    await asyncio.to_thread(subprocess.run, [sys.executable, *command], cwd=ROOT, check=True)
    idle = {}
    started = functools.partial(
        engine_rig, str(model), folder, pictures=PICTURES, side=side, seqs=SEQS
    )
    async with started(sleep_when_stalled=True) as rig:
        ttft = await _late_picture(rig, rounds, late_s)
        rows = sum(rig.header(picture).rows for picture in range(PICTURES))
        idle["sleeping"] = await _idle(rig)
    async with started(sleep_when_stalled=False) as rig:
        idle["polling"] = await _idle(rig)
    return {
        "ttft_ms": ttft | {"late_s": late_s, "picture_rows": rows},
        "idle_cpu_share": idle,
        "ready_to_scheduled_ms": await _ready_to_scheduled(folder, 3 * rounds),
    }


async def _late_picture(rig: Rig, rounds: int, late_s: float) -> dict[str, Any]:
    """In ms after the first picture: until the first token, both ways in turn."""
    pictures = range(PICTURES)
    times: dict[str, list[float]] = {"held": [], "early": []}
    for number in range(rounds + 2):
        for way, taken in times.items():
            keys = rig.keys(*pictures)
            started = time.perf_counter()
            asking = None
            for picture in pictures:
                if picture == PICTURES - 1:
                    await asyncio.sleep(late_s)
                await rig.pin(keys[picture], picture)
                if way == "early" and asking is None:
                    asking = asyncio.create_task(_one_token(rig, keys))
            await (asking or _one_token(rig, keys))
            if number >= 2:
                taken.append((time.perf_counter() - started) * 1e3)
            for key in keys:
                (rig.arena.pins / key).unlink()
        say(f"round {number + 1} of {rounds + 2}")
    return {way: _quantiles(taken) for way, taken in times.items()}


async def _one_token(rig: Rig, keys: Sequence[str]) -> None:
    answer = await rig.ask(f"late{next(rig.numbers)}", keys, range(PICTURES), max_tokens=1)
    if answer["status"] != 200:
        raise RuntimeError(f"the engine answered {answer['status']}")


async def _idle(rig: Rig) -> float:
    """The share of a core that the engine's processes take while all requests wait."""
    names = [f"never{next(rig.numbers)}" for _ in range(SEQS - 1)]
    waiting = [asyncio.create_task(rig.ask(name, rig.keys(0), (0,))) for name in names]
    for name in names:
        await rig.scheduled(name, 1)
    before, started = rig.cpu_s(), time.monotonic()
    await asyncio.sleep(IDLE_S)
    share = (rig.cpu_s() - before) / (time.monotonic() - started)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return round(share, 3)


async def _ready_to_scheduled(folder: Path, requests: int) -> dict[str, float]:
    """From the event's arrival at a subscriber to the beginning of the step, one request at a time."""
    (folder / STEPS).unlink(missing_ok=True)
    options = StackOptions(
        model=str(ROOT / "models" / "shapes-qwen2vl"),
        served_model="bench",
        port=0,
        state_dir=folder / "state",
        environment={
            "EPD_ENGINE_ARGS": "--scheduler-cls bench.stepping.SteppingScheduler",
            "PYTHONPATH": str(ROOT),
            FOLDER: str(folder),
        },
    )
    ready: list[float] = []

    async def on_event(message: Msg) -> None:
        if decode(message.data, EmbeddingEvent).state == "ready":
            ready.append(time.time())

    say("starting the services")
    rng = random.Random(4)
    times = []
    async with (
        run_stack(options, lambda view: None) as stack,
        Bus(stack.nats_url, name="bench") as bus,
        httpx.AsyncClient(base_url=stack.gateway_url, timeout=60) as client,
    ):
        await bus.subscribe(subjects.ready_subject("*"), on_event)
        for number in range(requests):
            ready.clear()
            response = await client.post(CHAT, json=_body(rng))
            response.raise_for_status()
            if number % 20 == 0:
                say(f"request {number + 1} of {requests}")
            began = _second_step(folder, response.headers["x-request-id"])
            if began is not None:
                times.append((began - ready[0]) * 1e3)
    if len(times) < requests / 2:
        raise RuntimeError(f"only {len(times)} of {requests} requests were in the engine early")
    return _quantiles(times)


def _body(rng: random.Random) -> dict[str, Any]:
    uri = shapes.data_uri(shapes.draw(shapes.random_scene(rng), 112, 140, rng))
    content = [
        {"type": "text", "text": EARLY_TEXT},
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "text", "text": "What is it?"},
    ]
    return {
        "model": "bench",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1,
    }


def _second_step(folder: Path, request_id: str) -> float | None:
    """When the engine went on after the text; None if text and picture were one step."""
    at = None
    for line in (folder / STEPS).read_text().splitlines():
        step = json.loads(line)
        for name, (computed, _) in step["requests"].items():
            if name.startswith(f"chatcmpl-{request_id}") and computed > 0 and at is None:
                at = float(step["at"])
    return at


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 1),
        "p90": round(ordered[int(0.9 * (len(ordered) - 1))], 1),
    }


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
