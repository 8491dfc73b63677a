"""This project beside vLLM's example proxy, on the same simulated engines, profile and clock.

    python -m bench.compare --workload random-mm --images 4 --rate 2 --rounds 5
    python -m bench.compare --workload azure --goodput --time-scale 2
    python -m bench.compare --workload random-mm --rate 2 --slow-encoder 5
    python -m bench.compare --workload random-mm --rate 2 --kill-encoder --rounds 3
    python -m bench.compare --systems ours,epd --pds 4 --prefills 2 --decodes 2 --rate 1
    python -m bench.compare --model models/shapes-qwen2vl --encoders 1 --pds 1 --concurrency 1 --images 4

In each round every system gets the same requests at the same times, one system after the other; only the one
that is measured runs. docs/benchmarks.md says what is alike on both sides, and what is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from bench.baseline.measure import Measurement, Plan, Row, compare, measure
from bench.baseline.systems import SYSTEMS, Shape
from bench.vllm_source import SourceError
from epd_bench.arguments import add_workload_arguments, workload_of
from epd_bench.errors import BenchError
from epd_bench.options import Pace, Search
from epd_bench.result import now, this_machine, versions
from epd_bench.slo import parse_slo
from epd_common.errors import EpdError
from epd_common.telemetry.logs import configure_logging
from epd_sim.profiles import PROFILES

_WIDTH = 140
"""Columns where there is no terminal."""


def main() -> int:
    arguments = _parser().parse_args()
    try:
        plan = _plan(arguments)
        return uvloop.run(run(plan, arguments))
    except BenchError as error:
        print(f"bench.compare: {error}", file=sys.stderr)
        return 2
    except (EpdError, SourceError) as error:
        print(f"bench.compare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # what was started has been ended
        return 130


def _parser() -> argparse.ArgumentParser:
    shape, search = Shape(), Search()
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--systems", default="ours,proxy", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--model", default=shape.model, help="a folder, for real vLLM instead of simulated engines"
    )
    parser.add_argument("--encoders", type=int, default=shape.encoders)
    parser.add_argument("--pds", type=int, default=shape.pds)
    parser.add_argument(
        "--prefills",
        type=int,
        help="of the system `epd`, and --decodes: --pds in all; default: half",
    )
    parser.add_argument("--decodes", type=int)
    parser.add_argument("--profile", choices=PROFILES, default=shape.profile)
    parser.add_argument("--time-scale", type=float, default=shape.time_scale)
    parser.add_argument("--max-num-seqs", type=int, default=shape.max_num_seqs)
    parser.add_argument("--slow-encoder", type=float, default=shape.slow_encoder, metavar="FACTOR")
    parser.add_argument("--kill-encoder", action="store_true", help="one, in the middle of the run")
    parser.add_argument("--dynamic", action="store_true", help="the proxy looks after its servers")
    parser.add_argument("--vllm-version", default=shape.vllm_version)
    add_workload_arguments(parser)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--burstiness", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--goodput", action="store_true")
    parser.add_argument("--from", dest="begin", type=float, default=search.begin)
    parser.add_argument("--probe-s", type=float, default=search.probe_s)
    parser.add_argument("--precision", type=float, default=search.precision)
    parser.add_argument(
        "--slo", default="default", help="in the profile's time, so without the scale"
    )
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--out", type=Path, help="a JSON file with everything")
    return parser


def _plan(arguments: argparse.Namespace) -> Plan:
    if sum((arguments.rate is not None, arguments.concurrency is not None, arguments.goodput)) > 1:
        raise BenchError("--rate, --concurrency and --goodput exclude each other")
    for name in ("rounds", "pds", "time_scale", "slow_encoder", "requests", "probe_s", "begin"):
        if not getattr(arguments, name) > 0:
            raise BenchError(f"--{name.replace('_', '-')} must be above 0")
    if arguments.kill_encoder and (arguments.encoders < 2 or arguments.goodput):
        raise BenchError("--kill-encoder needs two encoders or more, and no --goodput")
    if arguments.model:
        if not (Path(arguments.model) / "config.json").is_file():
            raise BenchError(f"--model: {arguments.model} has no config.json")
        if arguments.time_scale != 1 or arguments.slow_encoder != 1:
            raise BenchError("--time-scale and --slow-encoder are for simulated engines")
    prefills, decodes = _roles(arguments)
    workload = workload_of(arguments)
    return Plan(
        shape=Shape(
            model=arguments.model,
            encoders=arguments.encoders,
            pds=arguments.pds,
            prefill_pds=prefills,
            decode_pds=decodes,
            profile=arguments.profile,
            time_scale=arguments.time_scale,
            slow_encoder=arguments.slow_encoder,
            max_num_seqs=arguments.max_num_seqs,
            vllm_version=arguments.vllm_version,
            dynamic=arguments.dynamic,
        ),
        workload=workload,
        slo=parse_slo(arguments.slo).scaled(arguments.time_scale),
        pace=Pace(
            rate=arguments.rate or 0.0,
            burstiness=arguments.burstiness,
            users=arguments.concurrency or workload.users or 8,
            requests=arguments.requests,
        ),
        search=(
            Search(begin=arguments.begin, probe_s=arguments.probe_s, precision=arguments.precision)
            if arguments.goodput
            else None
        ),
        timeout_s=arguments.timeout,
        kill_encoder=arguments.kill_encoder,
    )


def _roles(arguments: argparse.Namespace) -> tuple[int, int]:
    """How many PD workers of the system ``epd`` prefill and decode."""
    prefills, decodes = arguments.prefills, arguments.decodes
    if prefills is None:
        prefills = arguments.pds // 2 if decodes is None else arguments.pds - decodes
    if decodes is None:
        decodes = arguments.pds - prefills
    if "epd" in arguments.systems.split(",") and (
        min(prefills, decodes) < 1 or prefills + decodes != arguments.pds
    ):
        raise BenchError(
            f"{prefills} prefill and {decodes} decode workers: the system `epd` needs one of each, and "
            f"as many in all as --pds, {arguments.pds}"
        )
    return prefills, decodes


async def run(plan: Plan, arguments: argparse.Namespace) -> int:
    """All rounds, then the table and the JSON file."""
    systems = arguments.systems.split(",")
    if unknown := set(systems) - SYSTEMS.keys():
        raise BenchError(
            f"--systems: there is no {', '.join(unknown)}; there are {', '.join(SYSTEMS)}"
        )
    found: list[Measurement] = []
    machine = this_machine()
    for number in range(arguments.rounds):
        for name in systems:
            print(f"round {number + 1} of {arguments.rounds}: {name}", file=sys.stderr, flush=True)
            found.append(await measure(plan, name, number, arguments.seed + number))
            print(f"  {_in_short(found[-1])}", file=sys.stderr, flush=True)
    rows = compare(found, systems)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(
        f"{plan.workload.name}: {plan.workload.about}\n{plan.shape.encoders} encoders, "
        f"{_pd_workers(plan.shape, systems)}, {_engines(plan.shape)}, "
        f"{arguments.rounds} rounds, seed {arguments.seed}; {machine.processor}, {machine.cores} cores; "
        f"SLO {plan.slo.text}",
        highlight=False,
    )
    console.print(_table(rows, systems))
    if arguments.out is not None:
        whole = {
            "date": now(),
            "command": sys.argv,
            "machine": msgspec.to_builtins(machine),
            "versions": versions() | {"proxy": plan.shape.vllm_version},
            "workload": plan.workload.model_dump(mode="json", exclude_none=True),
            "measurements": msgspec.to_builtins(found),
        }
        await asyncio.to_thread(_write, arguments.out, json.dumps(whole, indent=1))
    return 0


def _pd_workers(shape: Shape, systems: list[str]) -> str:
    roles = (
        f" (epd: {shape.prefill_pds} prefill, {shape.decode_pds} decode)"
        if "epd" in systems
        else ""
    )
    return f"{shape.pds} PD workers{roles}"


def _engines(shape: Shape) -> str:
    if shape.model:
        return f"real vLLM with {Path(shape.model).name}"
    return f"{shape.profile} x {shape.time_scale:g}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.rename(path)


def _in_short(measurement: Measurement) -> str:
    if measurement.goodput is not None:
        return f"goodput {measurement.goodput.rate:.3g} requests/s"
    summary, client = measurement.summary, measurement.client
    assert summary is not None and client is not None
    return (
        f"TTFT p50 {summary.ttft.p50:.3f} s, p99 {summary.ttft.p99:.3f} s, TPOT p50 "
        f"{summary.tpot.p50 * 1e3:.1f} ms, {summary.requests_per_s:.2f} requests/s, failures "
        f"{summary.failures or 'none'}, machine {client.machine_cpu:.0%} busy"
    )


def _table(rows: list[Row], systems: list[str]) -> Table:
    table = Table(
        title="medians; ratios: median (least to most of the rounds)", title_justify="left"
    )
    table.add_column("")
    for system in systems:
        table.add_column(system, justify="right")
    for other in systems[1:]:
        table.add_column(f"{systems[0]} / {other}", justify="right")
    for row in rows:
        ratios = [
            "-" if ratio is None else f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})"
            for ratio in row.ratios.values()
        ]
        table.add_row(row.name, *(f"{row.medians[system]:.4g}" for system in systems), *ratios)
    return table


if __name__ == "__main__":
    configure_logging("error", "text")
    sys.exit(main())
