"""What a request costs the processes around the engines: this project beside vLLM's example proxy.

    python -m bench.control_plane [--rounds 3] [--kinds text,4x300kB] [--out FILE]

The engines are simulated and take no time at all, and their encoders decode nothing: what is left is the
way to them and back. Requests stream 16 tokens; their pictures are JPEGs of their own, as data URIs. In each
round every system is started, gets the same requests 64 at a time, kind by kind, and is ended before the next
one starts. CPU time is counted, not time that passes, so other work on the machine matters less.
docs/benchmarks.md says more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from bench.baseline.systems import SYSTEMS, Shape, System
from bench.vllm_source import SourceError
from epd_bench.client import Client, body_maker
from epd_bench.distributions import Distribution
from epd_bench.errors import BenchError
from epd_bench.load import Load, run_load
from epd_bench.options import Pace
from epd_bench.processes import since
from epd_bench.result import now, this_machine, versions
from epd_bench.workloads import RequestKind, Workload, generate
from epd_common.errors import EpdError
from epd_common.telemetry.logs import configure_logging

USERS = 64
OUTPUT_TOKENS = 16
TEXT_TOKENS = 100
WARM_UP = 16
"""Requests of each kind before those that count: decoders are started then."""

DECODERS = "decoders"
"""The processes in which the gateway decodes pictures, counted apart from itself."""

TIMEOUT_S = 120.0
_WIDTH = 140


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of requests, and how many of them a round has."""

    images: int
    size: str
    requests: int

    def workload(self, name: str) -> Workload:
        kind = RequestKind(
            images=Distribution(fixed=self.images),
            sizes={self.size: 1.0},
            text_tokens=Distribution(fixed=TEXT_TOKENS),
            output_tokens=Distribution(fixed=OUTPUT_TOKENS),
        )
        return Workload(name=name, kinds=(kind,))


# Pictures of the harness have 18 kB at 256x256 and 303 kB at 1072x1072.
KINDS = {
    "text": Kind(0, "256x256", 1500),
    "1x20kB": Kind(1, "256x256", 800),
    "4x300kB": Kind(4, "1072x1072", 96),
    "8x300kB": Kind(8, "1072x1072", 64),
}


class Measured(msgspec.Struct, kw_only=True):
    """One kind of requests, sent to one system in one round.

    Attributes:
        cpu_ms: CPU milliseconds a request, by role; decoders apart from the gateway.
        reads: Pieces in which a stream's tokens came to the client.
    """

    system: str
    kind: str
    round: int
    cpu_ms: dict[str, float]
    requests_per_s: float
    reads: float


def main() -> int:
    arguments = _parser().parse_args()
    try:
        return uvloop.run(run(arguments))
    except BenchError as error:
        print(f"bench.control_plane: {error}", file=sys.stderr)
        return 2
    except (EpdError, SourceError) as error:
        print(f"bench.control_plane: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # what was started has been ended
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.control_plane",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--systems", default="ours,proxy", help="of ours, proxy")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vllm-version", default=Shape().vllm_version)
    parser.add_argument("--out", type=Path, help="a JSON file with everything")
    return parser


async def run(arguments: argparse.Namespace) -> int:
    """All rounds, then the table and the JSON file."""
    systems = _names(arguments.systems, ("ours", "proxy"), "--systems")
    kinds = _names(arguments.kinds, KINDS, "--kinds")
    if arguments.rounds < 1 or not arguments.scale > 0:
        raise BenchError("--rounds and --scale must be above 0")
    shape = Shape(
        encoders=1,
        pds=1,
        profile="instant",
        max_num_seqs=USERS,
        decodes=False,
        vllm_version=arguments.vllm_version,
    )
    machine = this_machine()
    found: list[Measured] = []
    for number in range(arguments.rounds):
        for name in systems:
            async with SYSTEMS[name](shape) as system:
                for kind in kinds:
                    found.append(
                        await measure(system, kind, number, arguments.seed, arguments.scale)
                    )
                    print(f"  {_in_short(found[-1])}", file=sys.stderr, flush=True)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(_table(found, systems, kinds))
    if arguments.out is not None:
        whole = {
            "date": now(),
            "command": sys.argv,
            "machine": msgspec.to_builtins(machine),
            "versions": versions() | {"proxy": shape.vllm_version},
            "unit": "CPU ms a request",
            "concurrency": USERS,
            "output_tokens": OUTPUT_TOKENS,
            "medians": medians(found),
            "measurements": msgspec.to_builtins(found),
        }
        await asyncio.to_thread(_write, arguments.out, json.dumps(whole, indent=1))
    return 0


def _names(text: str, known: Mapping[str, object] | tuple[str, ...], option: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names).difference(known):
        raise BenchError(
            f"{option}: there is no {', '.join(unknown)}; there are {', '.join(known)}"
        )
    return names


async def measure(system: System, kind: str, number: int, seed: int, scale: float) -> Measured:
    """Send the requests of one kind to a system that runs.

    Raises:
        BenchError: one of them failed, so that the figures would be of something else.
    """
    asked = KINDS[kind]
    workload = asked.workload(kind)
    bodies = body_maker("sim", seed + number, ignore_eos=True, temperature=None)
    bodies.pictures.prepare(workload.sizes)
    requests = generate(workload, seed + number)

    async def send(count: int) -> Load:
        pace = Pace(users=USERS, requests=count)
        # With connections of its own: those of the warm-up may have been idle until a server ends them.
        async with Client(system.url, timeout_s=TIMEOUT_S) as client:
            load = await run_load(client, bodies, requests, pace, seed, lambda load: False)
        if failed := [outcome for outcome in load.outcomes if outcome.failure]:
            raise BenchError(
                f"{system.name}, {kind}: {len(failed)} of {count} requests failed, the first by "
                f"{failed[0].failure}: {failed[0].detail}"
            )
        return load

    await send(WARM_UP)
    before = _cpu_seconds(system)
    load = await send(max(1, round(asked.requests * scale)))
    used = since(before, _cpu_seconds(system))
    return Measured(
        system=system.name,
        kind=kind,
        round=number,
        cpu_ms={role: seconds * 1e3 / load.sent for role, seconds in used.items()},
        requests_per_s=load.sent / load.lasted_s,
        reads=statistics.fmean(1 + len(outcome.gaps_s) for outcome in load.outcomes),
    )


def _cpu_seconds(system: System) -> dict[str, float]:
    used: dict[str, float] = {}
    for role, pids in system.pids.items():
        processes = [psutil.Process(pid) for pid in pids]
        used[role] = sum(map(_seconds, processes))
        if role == "gateway":
            used[DECODERS] = sum(
                _seconds(child) for process in processes for child in process.children()
            )
    return used


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def medians(found: list[Measured]) -> dict[str, dict[str, dict[str, float]]]:
    """By kind, system and role: the medians over the rounds."""
    by_place: dict[str, dict[str, dict[str, list[float]]]] = {}
    for measured in found:
        of_system = by_place.setdefault(measured.kind, {}).setdefault(measured.system, {})
        for role, cpu_ms in measured.cpu_ms.items():
            of_system.setdefault(role, []).append(cpu_ms)
    return {
        kind: {
            system: {role: round(statistics.median(each), 3) for role, each in roles.items()}
            for system, roles in of_kind.items()
        }
        for kind, of_kind in by_place.items()
    }


_ROLES = ("gateway", DECODERS, "proxy", "nats", "valkey", "pd", "encoder")


def _table(found: list[Measured], systems: list[str], kinds: list[str]) -> Table:
    table = Table(
        title=f"CPU ms a request, {USERS} at a time, {OUTPUT_TOKENS} tokens; medians of the rounds",
        title_justify="left",
    )
    for name in ("requests", "system"):
        table.add_column(name)
    for name in (*_ROLES, "gateway / proxy", "reads", "requests/s"):
        table.add_column(name, justify="right")
    middle = medians(found)
    for kind in kinds:
        for system in systems:
            of_roles = middle[kind][system]
            same = [m for m in found if (m.system, m.kind) == (system, kind)]
            proxy = middle[kind].get("proxy", {}).get("proxy")
            ratio = f"{of_roles['gateway'] / proxy:.2f}" if system == "ours" and proxy else ""
            table.add_row(
                kind,
                system,
                *(f"{of_roles[role]:.2f}" if role in of_roles else "" for role in _ROLES),
                ratio,
                f"{statistics.median(m.reads for m in same):.1f}",
                f"{statistics.median(m.requests_per_s for m in same):.0f}",
            )
    return table


def _in_short(measured: Measured) -> str:
    used = ", ".join(f"{role} {cpu_ms:.2f}" for role, cpu_ms in measured.cpu_ms.items())
    return f"round {measured.round + 1}, {measured.system}, {measured.kind}: {used} ms"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.rename(path)


if __name__ == "__main__":
    configure_logging("error", "text")
    sys.exit(main())
