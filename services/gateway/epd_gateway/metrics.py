"""Metrics of the gateway, and what it sees of queues and workers."""

from __future__ import annotations

import asyncio
import logging

from epd_common.accounts import Account
from epd_common.bus import Bus, Registry
from epd_common.bus.queues import queue_length
from epd_common.bus.streams import STREAMS
from epd_common.errors import UnavailableError
from epd_common.protocol.subjects import Stage, model_token
from epd_common.telemetry.metric_set import MetricSet

logger = logging.getLogger(__name__)

OTHER = "other"
"""The model of jobs whose model no worker has; names that anybody may make up are no labels."""


class GatewayMetrics(MetricSet):
    """One registry an application, so that two in one process do not collide."""

    def __init__(self) -> None:
        super().__init__()
        self._models_at_door: set[str] = set()
        self.requests = self.counter(
            "epd_gateway_requests",
            "Requests that ended, by route and HTTP status (499: the client went away).",
            ("route", "status"),
        )
        self.ttft = self.histogram(
            "epd_gateway_time_to_first_token_seconds",
            "From a request's arrival to the first byte of its answer.",
            ("route",),
        )
        self.duration = self.histogram(
            "epd_gateway_request_duration_seconds",
            "From a request's arrival to its end.",
            ("route",),
        )
        self.items = self.counter(
            "epd_gateway_items",
            "Distinct media items of requests: encoded for it, shared with an encode under way, or "
            "reused from a store.",
            ("origin",),
        )
        self.refused = self.counter(
            "epd_gateway_refused_keys",
            "Requests that were not let in: no API key, or a wrong one.",
        )
        self.admissions = self.counter(
            "epd_gateway_admissions",
            "Requests by tenant and what became of them at the door: let_in, tenant_over_share or "
            "system_full.",
            ("tenant", "outcome"),
        )
        self.media_refused = self.counter(
            "epd_gateway_media_refused",
            "Media and large bodies that were refused as their tenant has its bytes in the media store.",
            ("tenant",),
        )
        self.placements = self.counter(
            "epd_gateway_placements",
            "Requests by how they were placed: with a PD worker that holds what they begin with or has their "
            "embeddings on its node (held), with the one nearest to what they begin with, with the next one, "
            "with none in particular as both were crowded, or unplaced for want of a reason.",
            ("outcome",),
        )
        self.telling_workers = self.gauge(
            "epd_gateway_telling_workers",
            "PD workers of which this gateway knows what their prefix caches hold now.",
        )
        self.held_beginnings = self.gauge(
            "epd_gateway_held_beginnings",
            "Beginnings of prompts that these hold, each as often as it is held.",
        )
        self.open_cost = self.gauge(
            "epd_gateway_open_cost_tokens",
            "Weighted tokens of all open requests of a model, of all gateways, as this one last saw it.",
            ("model",),
        )
        self.capacity = self.gauge(
            "epd_gateway_admission_capacity_tokens",
            "Weighted tokens that the open requests of a model may have.",
            ("model",),
        )
        self.received = self.shown_counter(
            "epd_gateway_received", "Requests for an answer that came."
        )
        self.ended = self.shown_counter(
            "epd_gateway_ended",
            "Requests for an answer that ended: answered, failed, refused, or cancelled by their client.",
            ("outcome",),
        )
        self.ledger = self.gauge(
            "epd_gateway_ledger_reachable",
            "1 if the ledger of open requests answered last; 0: this gateway judges by its own alone.",
        )
        self.ledger.set(1)  # until it is asked
        self.open_requests = self.gauge("epd_gateway_open_requests", "Requests being answered now.")
        self.queue_jobs = self.gauge(
            "epd_gateway_queue_jobs",
            "Jobs of a stage that are not done, those in work included.",
            ("stage", "model"),
        )
        self.queue_oldest = self.gauge(
            "epd_gateway_queue_oldest_seconds",
            "Since the oldest job of a stage that is not done was published.",
            ("stage",),
        )
        self.slots = self.gauge(
            "epd_gateway_worker_slots",
            "Jobs that all ready workers take at once.",
            ("role", "model"),
        )
        self.busy = self.gauge(
            "epd_gateway_worker_busy_slots",
            "Slots of ready workers that have a job, by their latest heartbeats.",
            ("role", "model"),
        )
        self.arena_used = self.gauge(
            "epd_store_arena_used_bytes",
            "Published embeddings in a node's arena.",
            ("node",),
        )
        self.arena_quota = self.gauge(
            "epd_store_arena_quota_bytes",
            "What a node's arena may hold before it evicts.",
            ("node",),
        )

    def show_door(self, model: str, *, capacity: int, open_cost: int) -> None:
        """Show what a model may have open, and what it has."""
        self._models_at_door.add(model)
        self.capacity.labels(model).set(capacity)
        self.open_cost.labels(model).set(open_cost)

    def _forget_models(self, known: set[str]) -> None:
        """Show no more what the door had of models without a worker, of which it hears no more."""
        for model in self._models_at_door - known:
            self._models_at_door.remove(model)
            self.capacity.remove(model)
            self.open_cost.remove(model)

    def show_account(self, account: Account) -> None:
        """Show the gateway's accounts as they are, so that metrics and audits say the same."""
        self.received.read = lambda: {(): account.received}
        self.ended.read = lambda: {(outcome,): n for outcome, n in account.ended.items()}

    async def look(self, bus: Bus, registry: Registry) -> None:
        """Set the gauges of queues, workers and arenas. A broker that is away leaves out its queues."""
        self._look_at_workers(registry)
        self.queue_jobs.clear()
        self.queue_oldest.clear()
        models = {view.record.model for view in registry.workers() if view.record.model}
        await asyncio.gather(*(self._look_at_queue(bus, stage, models) for stage in STREAMS))

    def _look_at_workers(self, registry: Registry) -> None:
        for gauge in (self.slots, self.busy, self.arena_used, self.arena_quota):
            gauge.clear()
        views = [view for view in registry.workers() if view.alive and view.record.model]
        self._forget_models({view.record.model for view in views})
        for record in (view.record for view in views if view.ready):
            self.slots.labels(record.role, record.model).inc(record.slots)
            self.busy.labels(record.role, record.model).inc(record.busy)
        # Workers of a node see the same arena; the latest to look knows best.
        for record in (view.record for view in sorted(views, key=lambda view: view.seen)):
            self.arena_used.labels(record.node).set(record.arena_used_bytes)
            self.arena_quota.labels(record.node).set(record.arena_quota_bytes)

    async def _look_at_queue(self, bus: Bus, stage: Stage, models: set[str]) -> None:
        try:
            queue = await queue_length(bus, stage)
        except UnavailableError as error:
            logger.warning("no length of a queue: %s", error)
            return
        names = {model_token(model): model for model in models}
        for model in models:
            self.queue_jobs.labels(stage, model)
        for token, jobs in queue.jobs.items():
            self.queue_jobs.labels(stage, names.get(token, OTHER)).inc(jobs)
        self.queue_oldest.labels(stage).set(queue.oldest_s)
