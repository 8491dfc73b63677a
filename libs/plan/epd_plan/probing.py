"""Whether a simulated system keeps an SLO at a rate, and up to which one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from epd_bench.arrivals import arrival_times
from epd_bench.goodput import NoRateError, Probe, find_goodput
from epd_bench.slo import Slo
from epd_bench.workloads import Workload
from epd_plan.demand import Demand, demands
from epd_plan.requests import Asked
from epd_plan.shape import Shape, sliced
from epd_plan.simulate import Run, simulate
from epd_sim.profiles import Profile

LEAST, MOST, PROBE_S = 400, 2500, 40.0
"""Requests of a probe: as many as come in ``PROBE_S``, but within these bounds."""

ALONE = 100
"""Requests that are asked one by one before a search."""

PRECISION = 0.05


@dataclass(slots=True)
class Prober:
    """Probes of one workload, each with the same requests at the same random times.

    Attributes:
        say: Is told what came of each.
    """

    profile: Profile
    workload: Workload
    slo: Slo
    seed: int
    burstiness: float
    say: Callable[[str], None]
    _demands: list[Demand] = dataclasses.field(default_factory=list)

    def run(self, shape: Shape, rate: float, *, to_its_end: bool = True) -> Run:
        """A load at a rate.

        Args:
            to_its_end: Also where it is clear before that the SLO is not kept.
        """
        small, part = sliced(shape, rate)
        count = max(LEAST, min(MOST, round(part * PROBE_S)))
        hopeless = None if to_its_end else Hopeless(self.slo, count)
        times = arrival_times(part, self.burstiness, self.seed)
        return simulate(small, zip(times, self._first(count), strict=False), count, hopeless)

    def passes(self, shape: Shape, rate: float) -> Probe:
        """Whether the SLO is kept at a rate."""
        run = self.run(shape, rate, to_its_end=False)
        kept = run.kept(self.slo)
        probe = Probe(
            rate=rate,
            passed=not run.stopped and run.sent - kept <= self.slo.allowed(run.sent),
            sent=run.sent,
            kept=kept,
            stopped_early=run.stopped,
            seconds=run.lasted_s,
            ttft_p99_s=run.ttft.p99,
            tpot_p99_s=run.tpot.p99,
        )
        self.say(
            f"{name_of(shape)}: {'keeps' if probe.passed else 'breaks'} the SLO at {rate:.3g}/s"
        )
        return probe

    async def goodput(self, shape: Shape, begin: float) -> float:
        """The highest rate at which the SLO is kept, in requests a second; 0 if there is none.

        Args:
            begin: A guess.
        """

        async def probe(rate: float) -> Probe:
            return self.passes(shape, rate)

        try:
            found = await find_goodput(probe, begin=begin, precision=PRECISION, least=begin / 64)
        except NoRateError:
            return 0.0
        return found.rate

    def alone(self, shape: Shape) -> Run:
        """Requests one by one, each with nobody beside it."""
        far_apart_s = 1000.0 * max(1.0, self.profile.time_scale)
        times = itertools.count(0.0, far_apart_s)
        return simulate(shape, zip(times, self._first(ALONE), strict=False), ALONE)

    def _first(self, count: int) -> list[Demand]:
        """The first requests of the workload, kept as they are asked for again and again."""
        if len(self._demands) < count:
            fresh = demands(self.workload, self.seed, self.profile)
            self._demands = list(itertools.islice(fresh, count))
        return self._demands[:count]


class Hopeless:
    """Says when more requests have broken the SLO than may."""

    def __init__(self, slo: Slo, planned: int) -> None:
        self._slo = slo
        self._allowed = slo.allowed(planned)
        self._broken: set[Asked] = set()

    def __call__(self, asked: Asked) -> bool:
        demand = asked.demand
        if not self._slo.keeps(demand.images, asked.first_s - asked.at_s, None):
            self._broken.add(asked)
        return len(self._broken) > self._allowed


def name_of(shape: Shape) -> str:
    """A system in words."""
    if not shape.encoders:
        return f"{shape.pds} {'colocated' if shape.system == 'colocated' else 'ec_both'}"
    name = "" if shape.system == "split" else f"{shape.system}, "
    return f"{name}{shape.encoders} encoders + {shape.pds} PD workers"
