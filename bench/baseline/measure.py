"""One measurement of one system, and what several of them say together."""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from bench.baseline.systems import SERVED_MODEL, SYSTEMS, Shape, System
from epd_bench.bodies import BodyMaker
from epd_bench.client import Client, body_maker
from epd_bench.goodput import Goodput, NoRateError, find_goodput
from epd_bench.load import Load, run_load
from epd_bench.meter import ClientLoad, Meter
from epd_bench.options import Pace, Search
from epd_bench.probing import Prober
from epd_bench.run import WARM_UP_SEED
from epd_bench.slo import Slo
from epd_bench.summary import Summary, summarise
from epd_bench.target import TargetUse, use_between
from epd_bench.workloads import Workload, generate
from epd_common.errors import EpdError


class Measurement(msgspec.Struct, kw_only=True):
    """What one system did in one round.

    Attributes:
        light: Of a mix, the requests with one picture or none.
    """

    system: str
    round: int
    seed: int
    summary: Summary | None = None
    light: Summary | None = None
    goodput: Goodput | None = None
    client: ClientLoad | None = None
    use: TargetUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What each system is given, in each round the same; see :class:`epd_bench.options.Options`.

    Attributes:
        kill_encoder: The first encoder is killed when half of the requests were sent.
    """

    shape: Shape
    workload: Workload
    slo: Slo
    pace: Pace
    search: Search | None
    timeout_s: float
    warm_up: int = 4
    kill_encoder: bool = False


async def measure(plan: Plan, name: str, number: int, seed: int) -> Measurement:
    """Start a system, measure it, and end it: no other one runs meanwhile."""
    async with (
        SYSTEMS[name](plan.shape) as system,
        Client(system.url, timeout_s=plan.timeout_s) as client,
    ):
        await _warm_up(plan, client, seed)
        bodies = body_maker(SERVED_MODEL, seed, ignore_eos=True, temperature=None)
        bodies.pictures.prepare(plan.workload.sizes)
        if plan.search is not None:
            goodput = await _search(plan, plan.search, client, bodies, seed)
            return Measurement(system=name, round=number, seed=seed, goodput=goodput)
        return await _run(plan, system, client, bodies, number, seed)


async def _run(
    plan: Plan, system: System, client: Client, bodies: BodyMaker, number: int, seed: int
) -> Measurement:
    before = await system.read()
    look = _Killer(system) if plan.kill_encoder else _nothing
    requests = generate(plan.workload, seed)
    async with Meter() as meter:
        load = await run_load(client, bodies, requests, plan.pace, seed, look)
        used = meter.read(load.sent, [outcome.late_s for outcome in load.outcomes])
    after = await system.read()
    distinct = len(load.pictures)
    use = use_between(before, after, requests=load.sent, distinct_images=distinct)
    if plan.kill_encoder:  # its counts died with it
        use.encodes_per_distinct_image, use.counts = None, {}
    summary = functools.partial(
        summarise, lasted_s=load.lasted_s, distinct_images=distinct, slo=plan.slo
    )
    light = [outcome for outcome in load.outcomes if outcome.images <= 1]
    return Measurement(
        system=system.name,
        round=number,
        seed=seed,
        summary=summary(load.outcomes),
        light=summary(light) if 0 < len(light) < len(load.outcomes) else None,
        client=used,
        use=use,
    )


async def _search(
    plan: Plan, search: Search, client: Client, bodies: BodyMaker, seed: int
) -> Goodput:
    prober = Prober(
        client=client,
        bodies=bodies,
        requests=generate(plan.workload, seed),
        slo=plan.slo,
        seed=seed,
        probe_s=search.probe_s,
        least=search.least,
        burstiness=plan.pace.burstiness,
        say=lambda line: print(f"    {line}", file=sys.stderr, flush=True),
    )
    try:
        return await find_goodput(prober, begin=search.begin, precision=search.precision)
    except NoRateError as error:  # a finding about this system, and no reason to end the comparison
        return Goodput(rate=0.0, failed_at=error.probes[-1].rate, probes=error.probes)


async def _warm_up(plan: Plan, client: Client, seed: int) -> None:
    bodies = body_maker(SERVED_MODEL, seed + WARM_UP_SEED, ignore_eos=True, temperature=None)
    requests = generate(plan.workload, seed + WARM_UP_SEED)
    for _ in range(plan.warm_up):
        request = next(requests)
        outcome = await client.ask(request, bodies.body(request))
        if outcome.failure:
            raise EpdError(f"a request that warms up failed: {outcome.failure}: {outcome.detail}")


def _nothing(load: Load) -> bool:
    return False


class _Killer:
    def __init__(self, system: System) -> None:
        self._system = system
        self._killed = False

    def __call__(self, load: Load) -> bool:
        if not self._killed and load.planned is not None and load.sent >= load.planned / 2:
            self._killed = True
            self._system.kill_encoder()
        return False


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of all systems: medians over the rounds, and the first system's share of the others'.

    Attributes:
        ratios: By system: median, least and most of the rounds' ratios; none where a system has 0.
    """

    name: str
    medians: dict[str, float]
    ratios: dict[str, tuple[float, float, float] | None]


Figure = Callable[[Measurement], float]

_FIGURES: dict[str, Figure] = {
    "goodput, requests/s": lambda m: m.goodput.rate if m.goodput is not None else 0.0,
    "TTFT p50, s": lambda m: m.summary.ttft.p50 if m.summary is not None else 0.0,
    "TTFT p90, s": lambda m: m.summary.ttft.p90 if m.summary is not None else 0.0,
    "TTFT p99, s": lambda m: m.summary.ttft.p99 if m.summary is not None else 0.0,
    "TTFT p99 with one picture or none, s": lambda m: m.light.ttft.p99 if m.light else 0.0,
    "TPOT p50, s": lambda m: m.summary.tpot.p50 if m.summary is not None else 0.0,
    "TPOT p99, s": lambda m: m.summary.tpot.p99 if m.summary is not None else 0.0,
    "whole answer p50, s": lambda m: m.summary.e2e.p50 if m.summary is not None else 0.0,
    "requests/s": lambda m: m.summary.requests_per_s if m.summary is not None else 0.0,
    "within the SLO": lambda m: m.summary.slo_share if m.summary is not None else 0.0,
    "failed requests": lambda m: (
        float(sum(m.summary.failures.values())) if m.summary is not None else 0.0
    ),
    "encodes for each image": lambda m: (
        m.use.encodes_per_distinct_image or 0.0 if m.use is not None else 0.0
    ),
    "server CPU, s a request": lambda m: (
        sum(m.use.cpu_per_request_s.values()) if m.use is not None else 0.0
    ),
    "machine busy": lambda m: m.client.machine_cpu if m.client is not None else 0.0,
    "client's event loop late p99, s": lambda m: (
        m.client.lag_p99_s if m.client is not None else 0.0
    ),
}


def compare(measurements: list[Measurement], systems: list[str]) -> list[Row]:
    """The figures that any system has, each round's ratio taken by itself."""
    rounds = sorted({measurement.round for measurement in measurements})
    by_place = {(m.system, m.round): m for m in measurements}
    rows = []
    for name, figure in _FIGURES.items():
        values = {
            system: [figure(by_place[system, number]) for number in rounds] for system in systems
        }
        if not any(any(of_one) for of_one in values.values()):
            continue
        first, *others = systems
        ratios: dict[str, tuple[float, float, float] | None] = {}
        for other in others:
            if not all(values[other]):
                ratios[other] = None
                continue
            each = [a / b for a, b in zip(values[first], values[other], strict=True)]
            ratios[other] = (statistics.median(each), min(each), max(each))
        medians = {system: statistics.median(of_one) for system, of_one in values.items()}
        rows.append(Row(name, medians, ratios))
    return rows
