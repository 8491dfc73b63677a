"""``epd plan``: what a load needs, by a model of the system."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from epd_bench.arguments import workload_of
from epd_bench.slo import parse_slo
from epd_common.errors import EpdError
from epd_plan.costs import link_named
from epd_plan.needs import needs
from epd_plan.override import NAMES, override, write_override
from epd_plan.planning import MOST_GPUS, Choice, Plan, PlanError, Planner, Prices
from epd_plan.probing import Prober
from epd_plan.shape import Shape
from epd_sim.profiles import Profile, profile_named

EXIT_BAD_INPUT = 2


async def run_plan(arguments: argparse.Namespace) -> int:
    """Plan; exit code 2 where nothing can be."""
    progress = Console(stderr=True)
    try:
        planner = _planner(arguments, progress)
        if arguments.gpus is not None:
            plan = await planner.for_gpus(arguments.gpus, arguments.rate)
        else:
            plan = planner.for_rate(arguments.rate)
        if arguments.write:
            path = arguments.out
            write_override(path, override(plan, planner.base, arguments.write))
    except EpdError as error:
        print(f"epd plan: {error.message}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(plan), indent=1).decode())
        return 0
    console = Console()
    console.print(_table(plan))
    console.print(f"[bold]{plan.decision}[/]: {plan.why}", highlight=False)
    if arguments.write:
        console.print(f"written: {path}", highlight=False)
    return 0


def _planner(arguments: argparse.Namespace, progress: Console) -> Planner:
    profile = _profile(arguments.profile)
    if arguments.gpus is None and arguments.rate is None:
        raise PlanError(
            "give --gpus, --rate, or both: how many GPUs there are, or what they must serve"
        )
    if arguments.gpus is not None and not 1 <= arguments.gpus <= MOST_GPUS:
        raise PlanError(f"--gpus must be from 1 to {MOST_GPUS}, got {arguments.gpus}")
    for name in ("rate", "burstiness", "encoder_slowdown", "max_num_seqs"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise PlanError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    if arguments.out is None and arguments.write:
        arguments.out = Path(NAMES[arguments.write])
    workload = workload_of(arguments)
    base = Shape(
        profile=profile,
        encoders=1,
        pds=1,
        slow_factor=arguments.encoder_slowdown,
        max_num_seqs=arguments.max_num_seqs,
        pd_slots=2 * arguments.max_num_seqs,
        link=link_named(arguments.link),
    )
    return Planner(
        prober=Prober(
            profile,
            workload,
            parse_slo(arguments.slo),
            arguments.seed,
            arguments.burstiness,
            say=lambda line: progress.print(line, highlight=False, style="dim"),
        ),
        base=base,
        needs=needs(workload, arguments.seed, profile, base.costs),
        prices=_prices(arguments.price),
        priced=bool(arguments.price),
    )


def _profile(name: str) -> Profile:
    profile = profile_named(name)
    if not profile.step_s:
        raise PlanError(f"the profile {name!r} takes no time at all, so there is nothing to plan")
    return profile


def _prices(text: str) -> Prices:
    if not text:
        return Prices()
    found: dict[str, float] = {}
    for part in text.replace(" ", "").split(","):
        role, _, price = part.partition("=")
        try:
            found[role] = float(price)
        except ValueError:
            raise PlanError(f"--price: {price!r} in {part!r} is no number") from None
        if role not in ("encoder", "pd") or not 0 < found[role] < math.inf:
            raise PlanError(f"--price must be like encoder=1.2,pd=2.5, each above 0; got {part!r}")
    if len(found) != 2:
        raise PlanError("--price must name both: encoder=X,pd=Y")
    return Prices(**found)


def _table(plan: Plan) -> Table:
    table = Table(
        title=f"{plan.workload} on {plan.profile}, SLO {plan.slo}, seed {plan.seed}",
        title_justify="left",
    )
    table.add_column("")
    for choice in plan.choices:
        table.add_column(choice.system, justify="right")
    for name, show in _ROWS:
        if name == _COST:
            name += " (by --price)" if plan.priced else " (GPU-hours)"
        table.add_row(name, *map(show, plan.choices))
    return table


_COST = "1,000 requests cost"
_ROWS: tuple[tuple[str, Callable[[Choice], str]], ...] = (
    ("encoders", lambda choice: str(choice.encoders)),
    ("PD workers", lambda choice: str(choice.pds)),
    ("gateways", lambda choice: str(choice.gateways or "-")),
    ("goodput, requests/s", lambda choice: f"{choice.goodput:.3g}" if choice.goodput else "-"),
    ("at requests/s", lambda choice: f"{choice.rate:.3g}"),
    ("TTFT p50, s", lambda choice: f"{choice.ttft_p50_s:.3f}"),
    ("TTFT p99, s", lambda choice: f"{choice.ttft_p99_s:.3f}"),
    ("TPOT p50, ms", lambda choice: f"{choice.tpot_p50_s * 1e3:.1f}"),
    ("TPOT p99, ms", lambda choice: f"{choice.tpot_p99_s * 1e3:.1f}"),
    ("keep the SLO", lambda choice: f"{choice.slo_share:.1%}"),
    (
        "encoders busy",
        lambda choice: f"{choice.encoders_busy:.0%}" if choice.encoders else "-",
    ),
    ("PD workers busy", lambda choice: f"{choice.pds_busy:.0%}"),
    (_COST, lambda choice: f"{choice.per_1000:.3g}"),
)
