"""The run: load, faults, then the accounts, a verdict, and what is written of it."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.chaos.faults import Faults
from bench.chaos.load import ALL_TRIES_S, Load
from bench.chaos.report import Run, verdict, write
from bench.chaos.rig import Rig, processes, rig
from epd_cli.audit import notes, totals, until_balanced
from epd_cli.connect import operator_redis
from epd_common.tasks import end
from epd_common.telemetry.logs import configure_logging

SAMPLE_S = 1.0
SAY_S = 10.0
CALM_S = 60.0
"""After the last fault everything must serve, and all accounts must be balanced, within so long each."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--every", type=float, default=2.0, help="seconds from fault to fault")
    parser.add_argument("--pds", type=int, help="PD workers; 3, or none with --prefills")
    parser.add_argument("--prefills", type=int, default=0, help="workers that prefill alone")
    parser.add_argument("--decodes", type=int, default=0, help="workers that decode for those")
    parser.add_argument(
        "--out", type=Path, default=Path("build/chaos"), help="folder for the results"
    )
    arguments = parser.parse_args()
    if bool(arguments.prefills) != bool(arguments.decodes):
        parser.error("--prefills and --decodes go together")
    if arguments.pds is None:
        arguments.pds = 0 if arguments.prefills else 3
    configure_logging("error", "text")
    return asyncio.run(run(arguments))


async def run(arguments: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="epd-chaos-"))
    try:
        roles = processes(pds=arguments.pds, prefills=arguments.prefills, decodes=arguments.decodes)
        async with rig(folder, roles) as running:
            found = await storm(running, arguments)
    finally:
        await asyncio.to_thread(_keep_logs, folder, arguments.out / "logs")
        shutil.rmtree(folder, ignore_errors=True)
    await asyncio.to_thread(write, found, arguments.out)
    failures = verdict(found)
    for failure in failures:
        print(f"FAILED: {failure}")
    print("chaos: failed" if failures else "chaos: passed")
    return 1 if failures else 0


def _keep_logs(folder: Path, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for log in (*folder.glob("*.log"), *folder.glob("nats/*/server.log")):
        name = log.name if log.parent == folder else f"{log.parent.name}.log"
        shutil.copy(log, logs / name)


async def storm(rig: Rig, arguments: argparse.Namespace) -> Run:
    """Load and faults at the same time, then calm, then the accounts."""
    began = time.monotonic()
    stop = asyncio.Event()
    load = Load(
        rig.gateways,
        arguments.seed,
        requests=arguments.requests,
        rate=arguments.rate,
        began=began,
    )
    faults = Faults(rig, arguments.seed, every_s=arguments.every, began=began)
    memory: list[dict[str, Any]] = []
    sampling = asyncio.create_task(sample(rig, began, memory), name="memory")
    saying = asyncio.create_task(say(load, faults, began), name="progress")
    faulting = asyncio.create_task(faults.run(stop), name="faults")
    try:
        await load.run()
        stop.set()
        await asyncio.wait_for(faulting, 30)
    finally:
        await end(sampling, saying, faulting)
    lasted_s = time.monotonic() - began
    print("calm; waiting until everything serves and the accounts are balanced", flush=True)
    late = await rig.all_ready(CALM_S)
    async with operator_redis(rig.valkey.url) as redis:
        evidence, wrong = await until_balanced(
            rig.bus, rig.registry, redis, idle=True, within_s=CALM_S
        )
    return Run(
        seed=arguments.seed,
        rate=arguments.rate,
        every_s=arguments.every,
        requests=arguments.requests,
        lasted_s=lasted_s,
        limit_s=ALL_TRIES_S,
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        date=time.strftime("%Y-%m-%d"),
        outcomes=load.outcomes,
        faults=faults.done,
        memory=memory,
        late=late,
        differences=wrong,
        notes=notes(evidence),
        totals=totals(evidence),
        letters=evidence.letters,
        pending=evidence.pending,
        sent_again=load.sent_again,
    )


async def sample(rig: Rig, began: float, memory: list[dict[str, Any]]) -> None:
    while True:
        seen = await asyncio.to_thread(rig.memory)
        memory.append({"at_s": time.monotonic() - began, "seen": seen})
        await asyncio.sleep(SAMPLE_S)


async def say(load: Load, faults: Faults, began: float) -> None:
    while True:
        await asyncio.sleep(SAY_S)
        ended = Counter(outcome.ended for outcome in load.outcomes)
        answered = ended.pop("answered", 0)
        print(
            f"{time.monotonic() - began:5.0f} s: {load.sent} sent, {answered} answered, "
            f"{load.sent - len(load.outcomes)} open, errors {dict(ended)}, "
            f"{len(faults.done)} faults",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
