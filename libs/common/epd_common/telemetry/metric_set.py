"""The metrics of one process: a registry of its own, and a description of each for ``docs/metrics.md``.

Some are counted as things happen, by the client library's own types. Others are *shown*: read at each scrape
from where they are kept anyway, so that nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

Kind = Literal["counter", "gauge", "histogram"]
Values = Mapping[tuple[str, ...], float]
"""Values by those of the labels; of a metric without labels by ``()``."""

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Buckets of times, up to the default deadline of a request."""

UNITS = {
    "seconds": "seconds",
    "bytes": "bytes",
    "tokens": "tokens",
    "slots": "jobs",
    "jobs": "jobs",
    "requests": "requests",
    "items": "items",
    "workers": "workers",
    "beginnings": "beginnings of prompts",
    "info": "1",
    "state": "1 or 0",
    "reachable": "1 or 0",
    "owes": "1 or 0",
}
"""What a metric is in, by the last word of its name; ``total`` stands behind the word that says it."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A metric as ``docs/metrics.md`` shows it. ``name`` is that of its samples, with ``_total``."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...]

    @property
    def unit(self) -> str:
        """What it is in; a counter of events counts those that it is named for."""
        words = self.name.removesuffix("_total").split("_")
        if self.kind == "counter":
            return UNITS.get(words[-1], "events")
        return UNITS[words[-1]]


class MetricSet:
    """One registry a process, or an application, so that two in one process do not collide."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.specs: list[Spec] = []

    def counter(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Counter:
        """A counter; its samples' names end in ``_total``."""
        self._note(f"{name}_total", "counter", meaning, labels)
        return Counter(name, meaning, labels, registry=self.registry)

    def gauge(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Gauge:
        self._note(name, "gauge", meaning, labels)
        return Gauge(name, meaning, labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        meaning: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float] = SECONDS,
    ) -> Histogram:
        self._note(name, "histogram", meaning, labels)
        return Histogram(name, meaning, labels, buckets=buckets, registry=self.registry)

    def shown_counter(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Shown:
        return self._shown(CounterMetricFamily, f"{name}_total", "counter", meaning, labels)

    def shown_gauge(self, name: str, meaning: str, labels: Sequence[str] = ()) -> Shown:
        return self._shown(GaugeMetricFamily, name, "gauge", meaning, labels)

    def shown_histogram(self, name: str, meaning: str, *, buckets: Sequence[float]) -> ShownCounts:
        self._note(name, "histogram", meaning, ())
        shown = ShownCounts(name, meaning, buckets)
        self.registry.register(shown)
        return shown

    def _shown(
        self,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        kind: Kind,
        meaning: str,
        labels: Sequence[str],
    ) -> Shown:
        self._note(name, kind, meaning, labels)
        shown = Shown(lambda: family(name, meaning, labels=tuple(labels)))
        self.registry.register(shown)
        return shown

    def _note(self, name: str, kind: Kind, meaning: str, labels: Sequence[str]) -> None:
        self.specs.append(Spec(name, kind, meaning, tuple(labels)))


class Shown(Collector):
    """Counters or gauges whose values are kept elsewhere.

    Attributes:
        read: Gives them; nothing until it is set.
    """

    def __init__(self, family: Callable[[], CounterMetricFamily | GaugeMetricFamily]) -> None:
        self._family = family
        self.read: Callable[[], Values] = dict

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        family = self._family()
        for labels, value in self.read().items():
            family.add_metric(labels, value)
        yield family

    def describe(self) -> list[CounterMetricFamily | GaugeMetricFamily]:
        """Without this the registry would read it when it is registered."""
        return [self._family()]


class ShownCounts(Collector):
    """A histogram of whole numbers that are counted elsewhere: how often each came.

    Attributes:
        read: Gives them; nothing until it is set.
    """

    def __init__(self, name: str, meaning: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._meaning = meaning
        self._buckets = {str(float(bound)): bound for bound in buckets} | {"+Inf": float("inf")}
        self.read: Callable[[], Mapping[int, int]] = dict

    def collect(self) -> Iterator[HistogramMetricFamily]:
        counts = dict(self.read())
        buckets = [
            (name, sum(n for value, n in counts.items() if value <= bound))
            for name, bound in self._buckets.items()
        ]
        total = sum(value * n for value, n in counts.items())
        family = HistogramMetricFamily(self._name, self._meaning)
        family.add_metric([], buckets, total)
        yield family

    def describe(self) -> list[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._meaning)]
