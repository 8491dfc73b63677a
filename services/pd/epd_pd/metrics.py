"""Metrics of a PD worker beside those that all workers have."""

from __future__ import annotations

import time
from collections import Counter

from epd_common.backlog import Backlog
from epd_common.bus import JobPuller
from epd_common.telemetry.metric_set import MetricSet
from epd_common.telemetry.worker_metrics import chosen
from epd_pd.admission import Admission
from epd_pd.arrivals import Arrivals
from epd_pd.trail import Trail

RESCUES = {
    "redelivered": "redelivered",
    "reordered": "reordered",
    "encoded_here": "encoded_here",
    "gave_up": "gave_up",
}
FOUND = {f"found_{state}": state for state in ("ready", "pending", "claimed", "failed", "unknown")}
"""Counters of :class:`epd_pd.readiness.Readiness`, and the labels that they are shown under."""

KV = {"kv_loaded": "loaded", "kv_lost": "lost"}
"""The same of :class:`epd_pd.loading.Loading`."""


class PdMetrics:
    """How requests get their embeddings, and how they get into the engine.

    Args:
        metrics: Of the process.
    """

    def __init__(self, metrics: MetricSet) -> None:
        self.found = metrics.shown_counter(
            "epd_pd_items",
            "Items of requests by the state in which this worker found them first: ready, pending (somebody "
            "encodes it), claimed (nobody did, so this worker ordered it), failed, unknown (the states could "
            "not be read).",
            ("found",),
        )
        self.rescues = metrics.shown_counter(
            "epd_pd_rescues",
            "Items that did not come as they should, by what was done: redelivered (a further encoder had to "
            "try), reordered, encoded_here, gave_up (the request failed).",
            ("kind",),
        )
        self.lost = metrics.shown_counter(
            "epd_pd_lost_items",
            "Embeddings that were announced and were in no store when they were wanted: evicted, or gone "
            "with a node.",
        )
        self.to_engine = metrics.histogram(
            "epd_pd_ready_to_engine_seconds",
            "From when this worker knew that an item is ready to when the engine was told: bringing, "
            "verifying and pinning it, and the wait for admission.",
        )
        self.to_first_data = metrics.histogram(
            "epd_pd_ready_to_first_data_seconds",
            "From when this worker knew that the last item of a request is ready to the first data of its "
            "answer.",
        )
        self.entered = metrics.shown_counter(
            "epd_pd_admitted_requests",
            "Requests that entered the engine: complete, or early, with embeddings still missing; once more "
            "after a wrong forecast.",
            ("how",),
        )
        self.incomplete = metrics.shown_gauge(
            "epd_pd_incomplete_requests",
            "Requests that wait for embeddings now: inside the engine, or outside.",
            ("where",),
        )
        self.backlog = metrics.shown_gauge(
            "epd_pd_backlog_tokens",
            "Tokens that are to be prefilled here, and 64 for each answer that is being told; by this NATS "
            "gives the next job to the least loaded worker.",
        )
        self.resumed = metrics.shown_counter(
            "epd_pd_resumed_requests",
            "Streamed answers that went on here after their worker was lost.",
        )
        self.orphaned = metrics.shown_counter(
            "epd_pd_orphaned_requests", "Requests that ended as their requester had died."
        )
        self.wrong_forecasts = metrics.shown_counter(
            "epd_pd_wrong_forecasts",
            "Prompts that were begun anew, as an item had another size than was expected of it.",
        )
        self.handed_over = metrics.shown_counter(
            "epd_pd_handed_over_requests",
            "Requests that were prefilled here and left to decode workers, to each a decode job.",
        )
        self.kv = metrics.shown_counter(
            "epd_pd_kv_requests",
            "Decode jobs by what became of the keys and values that a prefill worker had left: loaded, or "
            "lost, so that the prompt was prefilled here once more.",
            ("how",),
        )
        self.loaded = metrics.shown_counter(
            "epd_pd_loaded_tokens",
            "Tokens of prompts that were not computed here, as a prefill worker had done so.",
        )
        self.handover = metrics.histogram(
            "epd_pd_handover_seconds",
            "From a decode job's publishing, by the clocks of broker and worker, to the first data of its "
            "answer; of an answer that is not streamed, to all of it.",
        )
        self.from_others = metrics.shown_counter(
            "epd_pd_from_others_jobs",
            "Jobs that were meant for another worker, which was full or gone.",
        )

    def show(
        self,
        counters: Counter[str],
        *,
        admission: Admission,
        backlog: Backlog,
        puller: JobPuller,
    ) -> None:
        """Where these are kept."""
        self.found.read = chosen(counters, FOUND)
        self.rescues.read = chosen(counters, RESCUES)
        self.lost.read = lambda: {(): counters["lost"]}
        self.resumed.read = lambda: {(): counters["resumed"]}
        self.orphaned.read = lambda: {(): counters["orphaned"]}
        self.wrong_forecasts.read = lambda: {(): counters["wrong_forecasts"]}
        self.handed_over.read = lambda: {(): counters["handed_over"]}
        self.kv.read = chosen(counters, KV)
        self.loaded.read = lambda: {(): counters["loaded_tokens"]}
        self.from_others.read = lambda: {(): puller.taken_from_others}
        self.backlog.read = lambda: {(): backlog.tokens}
        self.entered.read = lambda: {
            ("early",): admission.entered_early,
            ("complete",): admission.entered_complete,
        }
        self.incomplete.read = lambda: {
            ("inside",): admission.inside,
            ("outside",): admission.outside,
        }

    def decoded(self, trail: Trail) -> None:
        """A decode job has ended, with an answer or without."""
        if trail.told_after_s is not None:
            self.handover.observe(trail.told_after_s)

    def told(self, arrivals: Arrivals) -> None:
        """The engine knows now of all items that have arrived."""
        now = time.monotonic()
        for marks in arrivals.untold():
            if marks.ready is not None:
                self.to_engine.observe(now - marks.ready)

    def first_data(self, arrivals: Arrivals | None) -> None:
        """The first piece of the answer goes out.

        Args:
            arrivals: What it waited for; None: the prompt was handed over.
        """
        if arrivals is None:
            return
        ready = [marks.ready for marks in arrivals.marks if marks.ready is not None]
        if ready:
            self.to_first_data.observe(time.monotonic() - max(ready))
