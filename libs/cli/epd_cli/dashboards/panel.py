"""A panel, and the PromQL that panels are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        queries: PromQL, and how its series are named (Grafana's ``{{label}}``).
        unit: As Grafana names it.
        where: On which deployments it shows something: all, those with vLLM, those with prefill and decode
            workers, or none before a fault.
    """

    title: str
    meaning: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat"] = "timeseries"
    width: int = 8
    where: Literal["all", "vllm", "roles", "faults"] = "all"


FAILED = 'epd_gateway_requests_total{status=~"5.."}'


def per_s(metric: str, by: str = "") -> str:
    """Sum of a counter's rate, by labels if there are any."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}[$__rate_interval]))"


def quantile(part: float, histogram: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    rate = f"sum by ({labels}) (rate({histogram}_bucket[$__rate_interval]))"
    return f"histogram_quantile({part:g}, {rate})"


def quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    return tuple((quantile(part, histogram), f"p{part * 100:g}") for part in (0.5, 0.95, 0.99))


def mean(histogram: str) -> str:
    return f"{per_s(f'{histogram}_sum')} / {per_s(f'{histogram}_count')}"
