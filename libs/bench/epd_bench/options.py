"""What is to be measured, and how. Imports nothing heavy, so that a command line can show the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from epd_bench.slo import Slo
from epd_bench.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How requests follow each other, and when there were enough.

    Attributes:
        rate: Requests a second in an open loop; 0 is a closed loop of ``users``.
        burstiness: See :func:`epd_bench.arrivals.arrival_times`.
        users: Requests at a time in a closed loop.
        requests: So many at most.
        duration_s: None is sent after so many seconds.
        least: So many are sent in any case.
    """

    rate: float = 0.0
    burstiness: float = 1.0
    users: int = 1
    requests: int | None = None
    duration_s: float | None = None
    least: int = 1

    def planned(self) -> int | None:
        """How many there will be, as far as that is known."""
        by_time = None
        if self.duration_s is not None and self.rate:
            by_time = max(self.least, round(self.rate * self.duration_s))
        counts = [count for count in (self.requests, by_time) if count is not None]
        return min(counts) if counts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search for goodput.

    Attributes:
        begin: The first rate that is tried, requests a second.
        probe_s: Seconds in which the requests of a probe are sent.
        least: Requests of a probe at least.
        precision: Share by which what failed may lie above what passed.
    """

    begin: float = 1.0
    probe_s: float = 30.0
    least: int = 50
    precision: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is to be measured, and how.

    Attributes:
        model: Empty: the only one that the server has.
        search: Look for the goodput; then ``pace`` gives nothing but the burstiness.
        warm_up: Requests that come first and are not counted.
        out: Folder for the results; none writes nothing.
    """

    url: str
    workload: Workload
    slo: Slo
    pace: Pace
    search: Search | None = None
    seed: int = 1
    model: str = ""
    api_key: str = ""
    timeout_s: float = 120.0
    warm_up: int = 2
    ignore_eos: bool = True
    temperature: float | None = None
    out: Path | None = None
    with_plots: bool = True
