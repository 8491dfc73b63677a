"""Stage times and moves on one GPU, in torch alone: no vLLM, no download, eight minutes at most.

    python -m bench.gpu_epd [--device cuda] [--shape 7b] [--limit 450] [--json FILE]

The vision tower by size of picture, prefill by tokens, a step of decode by sequences; an embedding from the
device through pinned memory into the arena and back; and what it brings to begin prefill before the last
picture has come. A model of the shape of Qwen2.5-VL-7B with random weights (17 GB in bfloat16) in eager
kernels. Each section has a part of the limit: what does not fit is left out and named. At the limit the
program ends with what it has, and exit code 3. `--device cpu` runs a tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import gpu_steps
from bench.gpu_model import SHAPES, Decoder, VisionTower
from bench.gpu_steps import LARGE, SMALL, Budget
from epd_bench.result import now, this_machine
from epd_common.store import Arena

PARTS = {"build": 0.15, "moves": 0.2, "encode": 0.15, "prefill": 0.15, "decode": 0.1, "early": 0.2}
"""Shares of the limit, by section; the rest is for what begins just before a section's end."""

ARENA_BYTES = 1 << 30
CUT_OFF = 3


class Report:
    """What was found so far; written as a whole, at the end or at the limit."""

    def __init__(self, device: str, shape: str, file: Path | None, limit_s: float) -> None:
        self._file = file
        self._limit_s = limit_s
        self._began = time.monotonic()
        self._written = threading.Lock()
        self.root = Path()  # of the arena, once there is one
        machine = this_machine()
        self.found: dict[str, Any] = {
            "card": _card(device),
            "driver": _driver() if device == "cuda" else "",
            "torch": torch.__version__,
            "machine": f"{machine.processor}, {machine.cores} cores, load {machine.load_average:.1f}",
            "date": now(),
            "device": device,
            "shape": shape,
            "sections": {},
        }

    def section(self, name: str, act: Callable[[Budget], Any]) -> Any:
        """Run one within its budget, and say so."""
        budget = Budget(PARTS[name] * self._limit_s)
        self.say(f"{name}, {budget.seconds:.0f} s at most")
        found = act(budget)
        if isinstance(found, dict):
            self.found["sections"][name] = found
        if budget.left_out:
            self.found.setdefault("left_out", {})[name] = budget.left_out
            self.say(f"{name}: no time for {', '.join(budget.left_out)}")
        return found

    def say(self, line: str) -> None:
        """One line of progress."""
        print(f"[{time.monotonic() - self._began:6.1f} s] {line}", file=sys.stderr, flush=True)

    def write(self) -> None:
        """Print and write, once."""
        if not self._written.acquire(blocking=False):
            return
        self.found["took_s"] = round(time.monotonic() - self._began, 1)
        text = json.dumps(self.found, indent=1)
        print(text, flush=True)
        if self._file:
            self._file.write_text(text)

    def cut_off(self) -> None:
        """The limit: whatever runs now, a call into the driver included, is left where it is."""
        self.found["cut_off"] = True
        self.say("the limit: ending with what there is")
        self.write()
        if self.root != Path():
            shutil.rmtree(self.root, ignore_errors=True)  # on tmpfs it would be memory
        os._exit(CUT_OFF)


def run(report: Report, device: str, shape_name: str, root: Path) -> None:
    """All sections, one after the other."""
    shape = SHAPES[shape_name]
    scale = SMALL if device == "cpu" else LARGE
    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(1)  # two that wait for each other are slow where others run as well
    like = torch.empty(0, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    arena = Arena(root, quota_bytes=ARENA_BYTES, worker="bench")
    arena.open()
    try:
        with torch.inference_mode():
            steps = gpu_steps
            report.section("moves", lambda b: steps.moves(like, scale, arena, shape.width, b))
            tower, decoder = report.section(
                "build", lambda b: (VisionTower(shape, like), Decoder(shape, like))
            )
            report.section("encode", lambda b: steps.encode_times(tower, like, scale, b))
            report.section("prefill", lambda b: steps.prefill_times(decoder, like, scale, b))
            report.section("decode", lambda b: steps.decode_times(decoder, like, scale, b))
            report.section(
                "early", lambda b: steps.early_prefill(tower, decoder, like, scale, arena, b)
            )
    finally:
        arena.close()


def _card(device: str) -> str:
    if device == "cpu":
        return "none: run on the CPU, which says nothing of a GPU"
    return str(torch.cuda.get_device_name())


def _driver() -> str:
    """Its version; empty where nobody tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.splitlines()[0].strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_epd", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default: 7b; on a CPU tiny")
    parser.add_argument("--limit", type=float, default=450.0, metavar="SECONDS")
    parser.add_argument("--arena", type=Path, default=Path("/dev/shm"), help="a folder on tmpfs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here; --device cpu runs a tiny model", file=sys.stderr)
        return 2
    shape = arguments.shape or ("tiny" if arguments.device == "cpu" else "7b")
    report = Report(arguments.device, shape, arguments.json, arguments.limit)
    timer = threading.Timer(arguments.limit, report.cut_off)
    timer.daemon = True
    timer.start()
    with tempfile.TemporaryDirectory(prefix="epd-bench-", dir=arguments.arena) as root:
        report.root = Path(root)
        run(report, arguments.device, shape, Path(root))
    timer.cancel()
    report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
