"""Metrics of the gateway."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from epd_common.ledger import Ledger

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class GatewayMetrics:
    """One registry an application, so that two in one process do not collide."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "epd_gateway_requests",
            "Requests that ended, by route and HTTP status (499: the client went away).",
            ("route", "status"),
            registry=self.registry,
        )
        self.ttft = Histogram(
            "epd_gateway_time_to_first_token_seconds",
            "From a request's arrival to the first byte of its answer.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "epd_gateway_request_duration_seconds",
            "From a request's arrival to its end.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.items = Counter(
            "epd_gateway_items",
            "Distinct media items of requests: encoded for it, shared with an encode under way, or "
            "reused from a store.",
            ("origin",),
            registry=self.registry,
        )
        self.refused = Counter(
            "epd_gateway_refused_keys",
            "Requests that were not let in: no API key, or a wrong one.",
            registry=self.registry,
        )
        self.accounts = Accounts(self.registry)
        self.open_requests = Gauge(
            "epd_gateway_open_requests", "Requests being answered now.", registry=self.registry
        )


class Accounts(Collector):
    """The gateway's accounts as they are, so that metrics and audits say the same."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ledger = Ledger()
        registry.register(self)

    def show(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(
            "epd_gateway_received",
            "Requests for an answer that came.",
            value=self._ledger.received,
        )
        ended = CounterMetricFamily(
            "epd_gateway_ended",
            "Requests for an answer that ended: answered, failed, refused, or cancelled by their client.",
            labels=["outcome"],
        )
        for outcome, count in self._ledger.ended.items():
            ended.add_metric([outcome], count)
        yield ended
