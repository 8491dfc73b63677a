"""The highest rate at which enough requests keep the SLO: a bracket by doubling, then bisection.

Pure policy: a probe is somebody else's, and takes a rate.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from epd_bench.errors import BenchError


class Probe(msgspec.Struct, kw_only=True):
    """What came of one rate.

    Attributes:
        sent: Requests that were sent; fewer than planned where it was hopeless before its end.
        kept: Of those the ones that kept the SLO.
        stopped_early: More had broken it than may.
    """

    rate: float
    passed: bool
    sent: int = 0
    kept: int = 0
    stopped_early: bool = False
    seconds: float = 0.0
    ttft_p99_s: float = 0.0
    tpot_p99_s: float = 0.0
    failures: dict[str, int] = {}
    client_cpu: float = 0.0
    machine_cpu: float = 0.0
    warnings: list[str] = []


class Goodput(msgspec.Struct, kw_only=True):
    """What a search found.

    Attributes:
        rate: Requests a second; the highest that passed.
        failed_at: The lowest rate above it that did not; 0 if none was found, so ``rate`` is a lower bound.
    """

    rate: float
    failed_at: float
    probes: list[Probe]


class NoRateError(BenchError):
    """No rate that was tried meets the SLO."""

    default_code = "slo_unreachable"

    def __init__(self, probes: list[Probe]) -> None:
        last = probes[-1]
        times = (
            f"TTFT p99 {last.ttft_p99_s:.3g} s, TPOT p99 {last.tpot_p99_s:.3g} s"
            if last.ttft_p99_s
            else "none was answered in time"
        )
        failures = f", failures {last.failures}" if last.failures else ""
        super().__init__(
            f"no rate meets the SLO: even at {last.rate:.3g} requests/s only {last.kept} of {last.sent} "
            f"requests kept it ({times}{failures}); give a wider --slo, or begin with a slower --from"
        )
        self.probes = probes


async def find_goodput(
    probe: Callable[[float], Awaitable[Probe]],
    *,
    begin: float,
    precision: float = 0.1,
    least: float | None = None,
    most: float = 10_000.0,
) -> Goodput:
    """Search, beginning at a rate.

    Args:
        precision: Ends when what failed is at most this share above what passed.
        least: Lower rates are not tried; by default a sixteenth of ``begin``.
        most: Higher rates are not tried.

    Raises:
        NoRateError: none passed.
    """
    least = begin / 16 if least is None else least
    probes: list[Probe] = []

    async def passes(rate: float) -> bool:
        probes.append(await probe(rate))
        return probes[-1].passed

    passed, failed, rate = 0.0, 0.0, begin
    while not (passed and failed):
        if await passes(rate):
            passed = rate
            if rate >= most:
                return Goodput(rate=passed, failed_at=0.0, probes=probes)
            rate = failed or min(most, rate * 2)
        else:
            failed = rate
            if not passed and rate / 2 < least:
                raise NoRateError(probes)
            rate = passed or rate / 2
    while failed > passed * (1 + precision):
        middle = (passed * failed) ** 0.5
        if await passes(middle):
            passed = middle
        else:
            failed = middle
    return Goodput(rate=passed, failed_at=failed, probes=probes)
