"""Which system a load should have: encoders apart or not, and how many of what."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from epd_bench.errors import BenchError
from epd_plan.needs import Needs
from epd_plan.probing import PRECISION, Prober, name_of
from epd_plan.shape import Shape, System

Kind = Literal["colocated", "ec_both", "split"]
KINDS: tuple[Kind, ...] = ("colocated", "ec_both", "split")
"""``colocated``: servers of anybody; ``ec_both``: this project, with PD workers that encode, too; ``split``:
this project, with encoders apart. In the order of how many parts they have."""

MOST_GPUS = 4096
"""A load that needs more is none for this search."""

_MANY = 8
"""Encoders of which a request that is alone uses as many as it can."""


class PlanError(BenchError):
    """Nothing can be planned; the text says what to change."""

    default_code = "plan_failed"


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a GPU for an hour, by role; of a colocated server that of a PD worker."""

    encoder: float = 1.0
    pd: float = 1.0

    def of(self, shape: Shape) -> float:
        """Of a system for an hour."""
        return shape.encoders * self.encoder + shape.pds * self.pd


class Choice(msgspec.Struct, kw_only=True):
    """A system, and what to expect of it at a rate. Times in seconds.

    Attributes:
        system: One of ``KINDS``.
        goodput: The highest rate that keeps the SLO; 0 if there is none, or, where the rate was given, not
            looked for.
        gateways: Processes, each with four more cores for pictures.
        slo_share: Of the requests at ``rate``.
        per_1000: What 1,000 requests at ``rate`` cost: by the prices, else in GPU-hours.
    """

    system: str
    encoders: int
    pds: int
    gateways: int
    goodput: float
    rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    slo_share: float
    encoders_busy: float
    pds_busy: float
    per_1000: float


class Plan(msgspec.Struct, kw_only=True):
    """What to do, and why.

    Attributes:
        decision: The system of ``choices`` to take.
        choices: The best of each kind that keeps the SLO.
        priced: Whether prices were given.
    """

    decision: str
    why: str
    workload: str
    profile: str
    slo: str
    seed: int
    priced: bool
    choices: list[Choice]

    @property
    def chosen(self) -> Choice:
        return next(choice for choice in self.choices if choice.system == self.decision)


@dataclass(slots=True)
class Planner:
    """Looks for the best system.

    Attributes:
        base: What is alike in all of them; how many of what is not looked at.
    """

    prober: Prober
    base: Shape
    needs: Needs
    prices: Prices
    priced: bool

    async def for_gpus(self, gpus: int, rate: float | None) -> Plan:
        """The best use of so many GPUs.

        Args:
            rate: At which the times are told; by default at each system's goodput.

        Raises:
            PlanError: no system with so many keeps the SLO at any rate, or at that rate.
        """
        self._check_reachable()
        found = []
        for kind in ("colocated", "ec_both"):
            shape = self._shape(kind, 0, gpus)
            found.append((shape, await self._goodput(shape, self._guess(shape))))
        if gpus > 1:
            found.append(await self._best_split(gpus))
        best = max(goodput for _, goodput in found)
        nothing = f"{gpus} GPUs do not keep the SLO {self.prober.slo.text} at "
        if rate is None:
            nothing += "any rate"
        else:
            nothing += f"{rate:g} requests/s; their goodput is {best:.3g}"
        return self._plan(
            [
                self._choice(shape, goodput, rate or goodput)
                for shape, goodput in found
                if goodput and (rate is None or goodput >= rate)
            ],
            nothing,
        )

    def for_rate(self, rate: float) -> Plan:
        """The cheapest system that keeps the SLO at a rate.

        Raises:
            PlanError: none of up to ``MOST_GPUS`` does.
        """
        self._check_reachable()
        found = [self._enough(self._first_guess(kind, rate), rate) for kind in KINDS]
        return self._plan(
            [self._choice(shape, 0.0, rate) for shape in found if shape is not None],
            f"no system of up to {MOST_GPUS} GPUs keeps the SLO {self.prober.slo.text} at {rate:g}/s",
        )

    def _check_reachable(self) -> None:
        slo = self.prober.slo
        smallest = (self._shape("colocated", 0, 1), self._shape("split", _MANY, 1))
        runs = [self.prober.alone(shape) for shape in smallest]
        best = max(runs, key=lambda run: run.kept(slo))
        if best.sent - best.kept(slo) > slo.allowed(best.sent):
            raise PlanError(
                f"no number of GPUs meets the SLO {slo.text}: of {best.sent} requests, each alone in the "
                f"system, {best.kept(slo)} kept it (TTFT p50 {best.ttft.p50:.3g} s, p99 "
                f"{best.ttft.p99:.3g} s, TPOT p99 {best.tpot.p99:.3g} s); give a wider --slo",
                code="slo_unreachable",
            )

    def _shape(self, kind: Kind, encoders: int, pds: int, rate: float | None = None) -> Shape:
        system: System = "colocated" if kind == "colocated" else "split"
        shape = dataclasses.replace(self.base, system=system, encoders=encoders, pds=pds)
        rate = rate or 2 * self._guess(shape)
        return dataclasses.replace(shape, gateways=self.needs.gateways(rate, shape.cores))

    def _guess(self, shape: Shape) -> float:
        """About what it can do, in requests a second."""
        encode_s = self.needs.encode_s * shape.slow_factor
        if not shape.encoders:
            return shape.pds / (self.needs.encode_s + self.needs.engine_s)
        stages = [shape.pds / self.needs.engine_s]
        if encode_s:
            stages.append(shape.encoders / encode_s)
        return min(stages)

    async def _goodput(self, shape: Shape, begin: float) -> float:
        found = await self.prober.goodput(shape, begin)
        self.prober.say(f"{name_of(shape)}: goodput {found:.3g} requests/s")
        return found

    async def _best_split(self, gpus: int) -> tuple[Shape, float]:
        """Up or down from a guess, as long as that is better: the goodput has one summit."""
        encode_s = self.needs.encode_s * self.base.slow_factor
        share = encode_s / (encode_s + self.needs.engine_s)
        encoders = min(max(round(gpus * share), 1), gpus - 1)
        best = self._shape("split", encoders, gpus - encoders)
        goodput = await self._goodput(best, self._guess(best))
        stride = max(1, gpus // 32)
        for step in (-stride, stride):
            while 1 <= best.encoders + step <= gpus - 1:
                other = self._shape("split", best.encoders + step, best.pds - step)
                begin = goodput * (1 + PRECISION) or self._guess(other) / 4
                if not self.prober.passes(other, begin).passed:
                    break
                best, goodput = other, await self._goodput(other, begin)
        return best, goodput

    def _first_guess(self, kind: Kind, rate: float) -> Shape:
        encode_busy, engine_busy = rate * self.needs.encode_s, rate * self.needs.engine_s
        if kind != "split":
            return self._shape(kind, 0, max(1, math.ceil(encode_busy + engine_busy)), rate)
        encoders = max(1, math.ceil(encode_busy * self.base.slow_factor))
        return self._shape(kind, encoders, max(1, math.ceil(engine_busy)), rate)

    def _enough(self, shape: Shape, rate: float) -> Shape | None:
        """More of what helps most until the SLO is kept, then fewer of each as long as it still is.

        What helps is tried: a device that decodes anything at all is always busy, so that says nothing.
        """
        if shape.workers > MOST_GPUS:
            return None
        while not self.prober.passes(shape, rate).passed:
            larger = [self._with(shape, False, max(1, shape.pds // 10), rate)]
            if shape.encoders:
                larger.append(self._with(shape, True, max(1, shape.encoders // 10), rate))
            shape = max(larger, key=lambda one: self._kept_for_its_price(one, rate))
            if shape.workers > MOST_GPUS:
                return None
        for of_encoders in (True, False):
            while (fewer := self._fewer(shape, of_encoders, rate)) is not None:
                if not self.prober.passes(fewer, rate).passed:
                    break
                shape = fewer
        return shape

    def _kept_for_its_price(self, shape: Shape, rate: float) -> tuple[float, float]:
        run = self.prober.run(shape, rate)
        return run.kept(self.prober.slo) / run.sent, -self.prices.of(shape)

    def _fewer(self, shape: Shape, of_encoders: bool, rate: float) -> Shape | None:
        count = shape.encoders if of_encoders else shape.pds
        less = max(1, count // 20)
        return self._with(shape, of_encoders, -less, rate) if count > less else None

    def _with(self, shape: Shape, of_encoders: bool, more: int, rate: float) -> Shape:
        encoders, pds = (more, 0) if of_encoders else (0, more)
        return self._shape(_kind(shape), shape.encoders + encoders, shape.pds + pds, rate)

    def _choice(self, shape: Shape, goodput: float, rate: float) -> Choice:
        run = self.prober.run(shape, rate)
        slo = self.prober.slo
        return Choice(
            system=_kind(shape),
            encoders=shape.encoders,
            pds=shape.pds,
            gateways=self.needs.gateways(rate, shape.cores) if shape.system == "split" else 0,
            goodput=goodput,
            rate=rate,
            ttft_p50_s=run.ttft.p50,
            ttft_p99_s=run.ttft.p99,
            tpot_p50_s=run.tpot.p50,
            tpot_p99_s=run.tpot.p99,
            slo_share=run.kept(slo) / run.sent,
            encoders_busy=run.encoders_busy,
            pds_busy=run.pds_busy,
            per_1000=self.prices.of(shape) / 3.6 / rate,
        )

    def _plan(self, choices: Iterable[Choice], nothing: str) -> Plan:
        found = list(choices)
        if not found:
            raise PlanError(nothing, code="slo_unreachable")
        decision, why = decide(found)
        return Plan(
            decision=decision,
            why=why,
            workload=self.prober.workload.name,
            profile=self.base.profile.name,
            slo=self.prober.slo.text,
            seed=self.prober.seed,
            priced=self.priced,
            choices=found,
        )


def _kind(shape: Shape) -> Kind:
    if shape.system == "colocated":
        return "colocated"
    return "split" if shape.encoders else "ec_both"


def decide(choices: list[Choice]) -> tuple[str, str]:
    """The system to take, and why: the cheapest for a request, and of those that the search cannot tell apart
    the one with the fewest parts."""
    least = min(choice.per_1000 for choice in choices)
    taken = next(choice for choice in choices if choice.per_1000 <= least * (1 + PRECISION))
    others = [
        f"{abs(taken.per_1000 / other.per_1000 - 1):.0%} "
        f"{'less' if taken.per_1000 < other.per_1000 else 'more'} than with {other.system}"
        for other in choices
        if other is not taken
    ]
    missing = [kind for kind in KINDS if kind not in {choice.system for choice in choices}]
    parts = [f"a request costs {' and '.join(others)}"] if others else []
    parts += [f"{' and '.join(missing)} cannot keep the SLO so"] if missing else []
    return taken.system, "; ".join(parts)
