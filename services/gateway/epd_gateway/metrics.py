"""Metrics of the gateway."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
        self.admissions = Counter(
            "epd_gateway_admissions",
            "Requests by tenant and what became of them at the door: let_in, tenant_over_share or "
            "system_full.",
            ("tenant", "outcome"),
            registry=self.registry,
        )
        self.open_cost = Gauge(
            "epd_gateway_open_cost",
            "Weighted tokens of all open requests of a model, of all gateways, as this one last saw it.",
            ("model",),
            registry=self.registry,
        )
        self.capacity = Gauge(
            "epd_gateway_admission_capacity",
            "Weighted tokens that the open requests of a model may have.",
            ("model",),
            registry=self.registry,
        )
        self.ledger = Gauge(
            "epd_gateway_ledger_reachable",
            "1 if the ledger of open requests answered last; 0: this gateway judges by its own alone.",
            registry=self.registry,
        )
        self.open_requests = Gauge(
            "epd_gateway_open_requests", "Requests being answered now.", registry=self.registry
        )
