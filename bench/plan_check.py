"""The model behind ``epd plan`` beside the real services, on the same requests at the same times.

    python -m bench.plan_check                     # all shapes, about 11 minutes
    python -m bench.plan_check --only azure --seeds 3

Starts gateway, encoders, PD workers, NATS and Valkey on simulated engines and measures them as ``epd bench``
does; then the model gets the same seed. Exit code 1 where they differ by more than ``--within``. Wants a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from bench.baseline.measure import Measurement, Plan, measure
from bench.baseline.systems import Shape as Started
from epd_bench.arrivals import arrival_times
from epd_bench.builtin import RandomMm, find_workload
from epd_bench.options import Pace
from epd_bench.result import this_machine
from epd_bench.slo import parse_slo
from epd_common.telemetry.logs import configure_logging
from epd_plan.demand import demands
from epd_plan.shape import Shape
from epd_plan.simulate import Run, simulate
from epd_sim.profiles import profile_named

PROFILE = "qwen2.5-vl-7b-h100"
TIME_SCALE = 8.0
"""So that what two cores do besides is a small part."""

_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A system with a load.

    Attributes:
        rate: Requests a second, in real time.
    """

    name: str
    workload: str
    mix: RandomMm = dataclasses.field(default_factory=RandomMm)
    encoders: int
    pds: int
    rate: float
    requests: int


CASES = (
    Case(
        name="one picture",
        workload="random-mm",
        mix=RandomMm(images=1, sizes="1280x720", text=400, output=50),
        encoders=1,
        pds=1,
        rate=0.75,
        requests=150,
    ),
    Case(
        name="four pictures",
        workload="random-mm",
        mix=RandomMm(images=4, sizes="640x640", text=400, output=50),
        encoders=2,
        pds=2,
        rate=0.75,
        requests=150,
    ),
    Case(name="azure", workload="azure", encoders=2, pds=2, rate=0.6, requests=150),
)


async def measured(case: Case, seed: int) -> Measurement:
    """The real services."""
    return await measure(
        Plan(
            shape=Started(
                encoders=case.encoders, pds=case.pds, profile=PROFILE, time_scale=TIME_SCALE
            ),
            workload=find_workload(case.workload, case.mix),
            slo=parse_slo("default").scaled(TIME_SCALE),
            pace=Pace(rate=case.rate, requests=case.requests),
            search=None,
            timeout_s=120.0,
        ),
        "ours",
        0,
        seed,
    )


def modelled(case: Case, seed: int) -> Run:
    """The model."""
    started = Started()
    profile = dataclasses.replace(profile_named(PROFILE), time_scale=TIME_SCALE)
    shape = Shape(
        profile=profile,
        encoders=case.encoders,
        pds=case.pds,
        cores=2,
        max_num_seqs=started.max_num_seqs,
        pd_slots=2 * started.max_num_seqs,
        cache_bytes=started.arena_bytes,
    )
    load = zip(
        arrival_times(case.rate, 1.0, seed),
        demands(find_workload(case.workload, case.mix), seed, profile),
        strict=False,
    )
    return simulate(shape, load, case.requests)


def compared(found: Measurement, model: Run) -> dict[str, tuple[float, float]]:
    """What was measured, and what the model says, by name."""
    summary = found.summary
    assert summary is not None
    return {
        "TTFT p50, s": (summary.ttft.p50, model.ttft.p50),
        "TTFT p90, s": (summary.ttft.p90, model.ttft.p90),
        "TPOT p50, ms": (summary.tpot.p50 * 1e3, model.tpot.p50 * 1e3),
        "requests/s": (summary.requests_per_s, model.requests_per_s),
    }


async def run(arguments: argparse.Namespace) -> int:
    cases = [case for case in CASES if arguments.only in (None, case.name)]
    rows: list[dict[str, Any]] = []
    for case in cases:
        for seed in range(1, arguments.seeds + 1):
            print(f"{case.name}, seed {seed}", file=sys.stderr, flush=True)
            found = await measured(case, seed)
            assert found.summary is not None and found.client is not None
            print(
                f"  failures {found.summary.failures or 'none'}, machine "
                f"{found.client.machine_cpu:.0%} busy, CPU a request, ms: {_milliseconds(found)}",
                file=sys.stderr,
            )
            for name, (real, model) in compared(found, modelled(case, seed)).items():
                rows.append(
                    {"case": case.name, "seed": seed, "what": name, "real": real, "model": model}
                )
    machine = this_machine()
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(f"{machine.processor}, {machine.cores} cores; times x {TIME_SCALE:g}")
    console.print(_table(rows))
    if arguments.out is not None:
        text = json.dumps({"machine": machine.processor, "rows": rows}, indent=1)
        await asyncio.to_thread(arguments.out.write_text, text)
    worst = max(abs(row["model"] / row["real"] - 1) for row in rows)
    console.print(f"largest difference: {worst:.1%}")
    return int(worst > arguments.within)


def _milliseconds(found: Measurement) -> str:
    assert found.use is not None
    used = found.use.cpu_per_request_s
    return ", ".join(f"{role} {seconds * 1e3:.1f}" for role, seconds in used.items())


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("load", "seed", "", title_justify="left")
    for name in ("measured", "model", "difference"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["case"],
            str(row["seed"]),
            row["what"],
            f"{row['real']:.3f}",
            f"{row['model']:.3f}",
            f"{row['model'] / row['real'] - 1:+.1%}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.plan_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=[case.name for case in CASES])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--within", type=float, default=0.15)
    parser.add_argument("--out", type=Path, help="a JSON file")
    return uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    configure_logging("error", "text")
    sys.exit(main())
