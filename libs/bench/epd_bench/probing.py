"""One probe of the search for goodput: load at a rate, ended as soon as it is hopeless."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from epd_bench.bodies import BodyMaker
from epd_bench.client import Client, Outcome
from epd_bench.errors import BenchError
from epd_bench.goodput import Probe
from epd_bench.load import Load, run_load
from epd_bench.meter import Meter
from epd_bench.options import Pace
from epd_bench.quantiles import quantiles
from epd_bench.slo import Slo
from epd_bench.summary import keeps
from epd_bench.workloads import Picture, Request

ALONE = 5
"""Requests that are asked one by one before a search."""

SETTLE_S = 60.0
"""After a rate that was too much the server gets so long to come to rest."""


@dataclass(slots=True)
class Prober:
    """Makes probes, each with requests of its own out of one row.

    Attributes:
        probe_s: Seconds in which the requests of a probe are sent.
        least: Requests of a probe in any case: a share of few requests says little.
        say: Is told what goes on.
        sent: Requests of all probes.
        pictures: All that were sent.
    """

    client: Client
    bodies: BodyMaker
    requests: Iterator[Request]
    slo: Slo
    seed: int
    probe_s: float
    least: int
    burstiness: float
    say: Callable[[str], None]
    number: int = field(default=0, init=False)
    sent: int = field(default=0, init=False)
    pictures: set[Picture] = field(default_factory=set, init=False)

    async def __call__(self, rate: float) -> Probe:
        self.number += 1
        pace = Pace(
            rate=rate, burstiness=self.burstiness, duration_s=self.probe_s, least=self.least
        )
        planned = pace.planned()
        assert planned is not None
        pace = Pace(rate=rate, burstiness=self.burstiness, requests=planned)
        hopeless = _Hopeless(self.slo, planned)
        began = time.monotonic()
        async with Meter() as meter:
            load = await run_load(
                self.client, self.bodies, self.requests, pace, self.seed + self.number, hopeless
            )
            used = meter.read(load.sent, [outcome.late_s for outcome in load.outcomes])
        self.sent += load.sent
        self.pictures |= load.pictures
        kept = sum(keeps(outcome, self.slo) for outcome in load.outcomes)
        good = [outcome for outcome in load.outcomes if not outcome.failure]
        failures: dict[str, int] = {}
        for outcome in load.outcomes:
            if outcome.failure:
                failures[outcome.failure] = failures.get(outcome.failure, 0) + 1
        probe = Probe(
            rate=rate,
            passed=not load.aborted and planned - kept <= self.slo.allowed(planned),
            sent=load.sent,
            kept=kept,
            stopped_early=load.aborted,
            seconds=time.monotonic() - began,
            ttft_p99_s=quantiles(outcome.ttft_s for outcome in good).p99,
            tpot_p99_s=quantiles(o.tpot_s for o in good if o.tpot_s >= 0).p99,
            failures=failures,
            client_cpu=used.cpu,
            machine_cpu=used.machine_cpu,
            warnings=used.warnings,
        )
        self.say(
            f"{rate:7.3g} requests/s: {kept} of {load.sent} kept the SLO, "
            f"{'passed' if probe.passed else 'failed'}{' early' if probe.stopped_early else ''} "
            f"({probe.seconds:.0f} s, machine {used.machine_cpu:.0%} busy)"
        )
        if not probe.passed:
            await self._settle()
        return probe

    async def check(self) -> None:
        """Ask a few requests one by one, so that no search begins for what cannot be.

        Raises:
            BenchError: none of them kept the SLO.
        """
        outcomes = []
        for _ in range(ALONE):
            outcomes.append(await self._alone())
            if keeps(outcomes[-1], self.slo):
                return
        best = min(outcomes, key=lambda outcome: (bool(outcome.failure), outcome.ttft_s))
        raise BenchError(
            f"no rate meets the SLO: of {ALONE} requests, each alone, none kept it; the best one "
            + (
                f"failed: {best.failure}: {best.detail}"
                if best.failure
                else f"with {best.images} images took {best.ttft_s:.3g} s to its first token, and "
                f"{max(0.0, best.tpot_s):.3g} s for each further one"
            ),
            code="slo_unreachable",
        )

    async def _alone(self) -> Outcome:
        request = next(self.requests)
        self.sent += 1
        self.pictures.update(request.pictures)
        return await self.client.ask(request, self.bodies.body(request))

    async def _settle(self) -> None:
        """Ask one request after another until one keeps the SLO, for a bounded time: a server may go on
        with what nobody waits for any more."""
        give_up = time.monotonic() + SETTLE_S
        while time.monotonic() < give_up:
            if keeps(await self._alone(), self.slo):
                return
        self.say(f"the server did not come to rest within {SETTLE_S:g} s")


class _Hopeless:
    """Says when more requests have broken the SLO than may, those that are late already included."""

    def __init__(self, slo: Slo, planned: int) -> None:
        self._slo = slo
        self._allowed = slo.allowed(planned)

    def __call__(self, load: Load) -> bool:
        broken = sum(not keeps(outcome, self._slo) for outcome in load.outcomes)
        if broken > self._allowed:
            return True
        now_s = time.monotonic() - load.began
        late = sum(
            not one.watch.first_token_at and now_s - one.at_s > self._slo.ttft.of(one.images)
            for one in load.open.values()
        )
        return broken + late > self._allowed
