"""A load in a simulated system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from epd_bench.quantiles import Quantiles, quantiles
from epd_bench.slo import Slo
from epd_plan.demand import Demand
from epd_plan.events import Events
from epd_plan.others import Colocated, FanIn
from epd_plan.requests import Asked, Outcome, Record
from epd_plan.shape import Shape
from epd_plan.split import Split

_SYSTEMS: dict[str, type[Split | FanIn | Colocated]] = {
    "split": Split,
    "fan-in": FanIn,
    "colocated": Colocated,
}


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a load.

    Attributes:
        sent: Requests; as many as ``outcomes`` and ``open`` together.
        open: Those without an end: none, but where the run was stopped.
        lasted_s: To the end of the last answer.
        encoders_busy: Share of that in which the encoders' devices computed.
        pds_busy: The same of the others.
    """

    sent: int
    outcomes: list[Outcome]
    open: int
    lasted_s: float
    encoders_busy: float
    pds_busy: float
    stopped: bool

    @property
    def ttft(self) -> Quantiles:
        return quantiles(outcome.ttft_s for outcome in self.outcomes)

    @property
    def tpot(self) -> Quantiles:
        return quantiles(outcome.tpot_s for outcome in self.outcomes if outcome.tpot_s >= 0)

    @property
    def requests_per_s(self) -> float:
        return len(self.outcomes) / self.lasted_s if self.lasted_s else 0.0

    def kept(self, slo: Slo) -> int:
        """Requests that kept the SLO."""
        return sum(
            slo.keeps(one.images, one.ttft_s, one.tpot_s if one.tpot_s >= 0 else None)
            for one in self.outcomes
        )


def simulate(
    shape: Shape,
    load: Iterator[tuple[float, Demand]],
    count: int,
    hopeless: Callable[[Asked], bool] | None = None,
) -> Run:
    """Send requests, and let time pass until all are answered.

    Args:
        load: When each comes, in order, and what it is.
        count: So many are sent.
        hopeless: Is shown each request with its first token and with its last; True stops the run.
    """
    events = Events()
    stopped = False

    def noted(asked: Asked) -> None:
        nonlocal stopped
        if hopeless is not None and hopeless(asked):
            stopped = True
            events.stop()

    record = Record(events, shape.costs.message_s, noted)
    system = _SYSTEMS[shape.system](events, shape, record)
    sent = 0

    def send(demand: Demand) -> None:
        nonlocal sent
        sent += 1
        system.send(record.sent(demand))
        if sent < count:
            plan_next()

    def plan_next() -> None:
        at, demand = next(load)
        events.at(at, send, demand)

    plan_next()
    events.run()
    lasted_s = max((one.at_s + one.e2e_s for one in record.outcomes), default=0.0)
    return Run(
        sent=sent,
        outcomes=record.outcomes,
        open=len(record.open),
        lasted_s=lasted_s,
        encoders_busy=_busy([each.device.busy_s for each in system.encoders], events.now),
        pds_busy=_busy([each.device.busy_s for each in system.pds], events.now),
        stopped=stopped,
    )


def _busy(seconds: list[float], lasted_s: float) -> float:
    return sum(seconds) / len(seconds) / lasted_s if seconds and lasted_s else 0.0
