"""``epd bench``: load on any OpenAI-compatible server, and what it does with it."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from epd_bench.arguments import workload_of
from epd_bench.errors import BenchError
from epd_bench.options import Options, Pace, Search
from epd_bench.processes import cpu_seconds
from epd_bench.run import bench as measure
from epd_bench.slo import parse_slo
from epd_bench.target import Reading
from epd_bench.workloads import Workload
from epd_cli.bench_arguments import DEFAULT_REQUESTS
from epd_cli.connect import operator_bus
from epd_cli.stack import read_state
from epd_common.bus import Registry
from epd_common.errors import EpdError
from epd_common.health import ask_health

EXIT_BAD_INPUT = 2
COUNTS = (
    *("encoded", "hits", "embedding_bytes", "redis_fetched_bytes", "arena_hits"),
    *("handed_over", "kv_loaded", "kv_lost"),
)


async def run_bench(arguments: argparse.Namespace) -> int:
    """Measure; exit code 2 where nothing could be, and nothing was written."""
    console = Console()
    try:
        options, state = _read(arguments)
        observer = LocalStack(state) if state is not None else None
        await measure(options, observer, console)
    except BenchError as error:
        print(f"epd bench: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


def _read(arguments: argparse.Namespace) -> tuple[Options, dict[str, Any] | None]:
    state = _state(arguments)
    workload = workload_of(arguments)
    seed = random.SystemRandom().randrange(1_000_000) if arguments.seed is None else arguments.seed
    name = f"{workload.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    slo = parse_slo(arguments.slo)
    for option, value in (
        ("timeout", arguments.timeout),
        ("probe-s", arguments.probe_s),
        ("precision", arguments.precision),
        ("burstiness", arguments.burstiness),
        ("from", arguments.begin),
    ):
        _above_nothing(f"--{option}", value)
    options = Options(
        url=arguments.url or _gateway(state),
        workload=workload,
        slo=slo,
        pace=_pace(arguments, workload),
        search=_search(arguments),
        seed=seed,
        model=arguments.model,
        api_key=arguments.api_key or os.environ.get("OPENAI_API_KEY", ""),
        timeout_s=arguments.timeout,
        warm_up=arguments.warmup,
        ignore_eos=not arguments.stop_at_eos,
        temperature=arguments.temperature,
        out=arguments.out or Path("build/bench", name),
        with_plots=not arguments.no_plots,
    )
    same = state is not None and options.url.rstrip("/").removesuffix("/v1") == _gateway(state)
    return options, state if same else None


def _pace(arguments: argparse.Namespace, workload: Workload) -> Pace:
    rate, users = arguments.rate, arguments.concurrency
    if sum((rate is not None, users is not None, arguments.goodput)) > 1:
        raise BenchError("--rate, --concurrency and --goodput exclude each other")
    for name in ("rate", "concurrency", "requests", "duration"):
        if getattr(arguments, name) is not None:
            _above_nothing(f"--{name}", getattr(arguments, name))
    if arguments.warmup < 0:
        raise BenchError("--warmup must be 0 or more")
    requests = arguments.requests
    if requests is None and arguments.duration is None:
        requests = DEFAULT_REQUESTS
    return Pace(
        rate=rate or 0.0,
        burstiness=arguments.burstiness,
        users=users or workload.users or 8,
        requests=requests,
        duration_s=arguments.duration,
    )


def _search(arguments: argparse.Namespace) -> Search | None:
    if not arguments.goodput:
        return None
    if arguments.requests is not None or arguments.duration is not None:
        raise BenchError(
            "with --goodput the length of a probe is --probe-s, not --requests or --duration"
        )
    return Search(begin=arguments.begin, probe_s=arguments.probe_s, precision=arguments.precision)


def _above_nothing(name: str, value: float) -> None:
    if not value > 0:
        raise BenchError(f"{name} must be above 0, got {value:g}")


def _state(arguments: argparse.Namespace) -> dict[str, Any] | None:
    try:
        return read_state(arguments.state_dir)
    except EpdError as error:
        if arguments.url:
            return None
        raise BenchError(f"--url is not given, and {error}") from error


def _gateway(state: dict[str, Any] | None) -> str:
    return str(state["gateway_url"]).rstrip("/") if state is not None else ""


@dataclass(frozen=True, slots=True)
class LocalStack:
    """What ``epd up`` started on this machine, by its ``state.json``."""

    state: dict[str, Any]

    async def read(self) -> Reading:
        """CPU by role, and the workers' counters."""
        pids: dict[str, list[int]] = {}
        for process in self.state["processes"]:
            pids.setdefault(process["role"], []).append(process["pid"])
        counts = dict.fromkeys(COUNTS, 0)
        async with (
            operator_bus(self.state["nats_url"], name="epd bench") as bus,
            Registry(bus) as registry,
        ):
            for view in registry.workers():
                if not view.alive or view.record.role == "gateway":
                    continue
                try:
                    answer: dict[str, Any] = await ask_health(bus, view.record.worker)
                except TimeoutError:  # it has died since its last heartbeat, and its counts with it
                    continue
                for name in COUNTS:
                    counts[name] += answer.get("counters", {}).get(name, 0)
        return Reading(cpu_s=cpu_seconds(pids), counts=counts)
