"""Metrics that encoders and PD workers have in common: jobs, engine, the making of embeddings, stores.

``epd_encoder_*`` is what has to do with encode jobs and items that are encoded, also where a PD worker does
it; ``epd_pd_*`` with generate jobs; ``epd_store_*`` with embeddings at rest. What a process has not, it does
not show.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, get_args

from epd_common.accounts import Account
from epd_common.protocol import WorkerState
from epd_common.protocol.subjects import Stage
from epd_common.store.nixl.errors import REASONS
from epd_common.telemetry.exposition import EngineMetrics
from epd_common.telemetry.metric_set import MetricSet, Values

Role = Literal["encoder", "pd"]
PREFIXES: dict[Stage, str] = {"encode": "epd_encoder", "generate": "epd_pd"}
BATCHES = (1, 2, 4, 8, 16, 32, 64)

OUTCOMES: dict[Stage, tuple[str, ...]] = {
    "encode": (
        "ready",
        "stale",
        "failed",
        "dropped",
        "malformed",
        "given_up",
        "given_back",
        "repeated",
    ),
    "generate": (
        "answered",
        "handed_over",
        "failed",
        "cancelled",
        "expired",
        "taken_over",
        "duplicate",
        "malformed",
        "given_up",
        "given_back",
        "repeated",
    ),
}
"""Shown as 0 before they happen, so that the first one is seen as a change."""

MADE = {"encoded": "encoded", "hits": "hit", "stale": "stale", "unwanted": "unwanted"}
"""Counters of :class:`epd_common.encode.Encoding`, and the outcomes that they are shown as."""

_Sums = dict[tuple[str, ...], tuple[str, ...]]

_MOVED: _Sums = {
    ("arena", "written"): ("embedding_bytes", "nixl_fetched_bytes", "redis_fetched_bytes"),
    ("arena", "read"): ("arena_read_bytes",),
    ("nixl", "written"): ("nixl_written_bytes",),
    ("nixl", "read"): ("nixl_fetched_bytes",),
    ("redis", "written"): ("redis_written_bytes",),
    ("redis", "read"): ("redis_fetched_bytes",),
}
_MOVES: _Sums = {
    ("arena", "written"): ("encoded", "nixl_fetches", "redis_fetches"),
    ("arena", "read"): ("arena_hits",),
    ("nixl", "written"): ("nixl_written",),
    ("nixl", "read"): ("nixl_fetches",),
    ("redis", "written"): ("redis_written",),
    ("redis", "read"): ("redis_fetches",),
}
"""Counters whose sum is what a store took or gave. What is fetched is written into the arena."""


class WorkerMetrics(MetricSet):
    """Of one worker process.

    Args:
        role: Of the process; it says under which prefix it shows itself.
    """

    def __init__(self, role: Role) -> None:
        super().__init__()
        self.registry.register(EngineMetrics())
        prefix = f"epd_{role}"
        self.info = self.gauge(
            f"{prefix}_info",
            "Who this worker is; always 1."
            + (" Its role is pd, prefill or decode." if role == "pd" else ""),
            ("worker", "node", "model", "engine", *(("role",) if role == "pd" else ())),
        )
        self.state = self.shown_gauge(
            f"{prefix}_state",
            "1 for the state that the worker is in, 0 for the others: starting, ready, draining, failed.",
            ("state",),
        )
        self.started = self.gauge(
            f"{prefix}_start_time_seconds", "When the process began, in Unix time."
        )
        self.started.set(time.time())
        self.steps = self.shown_counter(
            f"{prefix}_engine_steps",
            "Steps in which the engine computed something. A busy worker whose steps stand still hangs.",
        )
        self.owes = self.shown_gauge(
            f"{prefix}_engine_owes",
            "1 if the engine has something to compute now; 0 if it is idle or waits for embeddings.",
        )
        self.given_back = self.shown_counter(
            f"{prefix}_given_back_jobs",
            "Jobs that went back to their queue: the worker was shut down, its engine failed, or a broker "
            "or store did not answer it.",
        )
        self.stages: dict[Stage, StageMetrics] = {
            stage: StageMetrics(self, stage)
            for stage in (("encode", "generate") if role == "pd" else ("encode",))
        }
        self.encode = EncodeMetrics(self)
        self.store = StoreMetrics(self)

    def show_counters(self, counters: Counter[str]) -> None:
        """Show what the parts of the process count."""
        self.given_back.read = lambda: {(): counters["given_back"]}
        self.encode.made.read = chosen(counters, MADE)
        for shown, sums in ((self.store.moved, _MOVED), (self.store.moves, _MOVES)):
            shown.read = _sums(counters, sums)
        self.store.faults.read = lambda: {(): counters["integrity_faults"]}

    def show_state(self, read: Callable[[], WorkerState]) -> None:
        states = get_args(WorkerState)
        self.state.read = lambda: {(state,): float(state == read()) for state in states}


class StageMetrics:
    """Jobs of one queue, as this worker sees them."""

    def __init__(self, metrics: MetricSet, stage: Stage) -> None:
        prefix = PREFIXES[stage]
        self._none: dict[tuple[str, ...], float] = {(outcome,): 0 for outcome in OUTCOMES[stage]}
        self._published: Counter[float] = Counter()
        self.jobs = metrics.shown_counter(
            f"{prefix}_jobs",
            f"{stage.capitalize()} jobs that came to this worker and ended, by what became of them; "
            'see "Is everything accounted for?" in operations.md.',
            ("outcome",),
        )
        self.wait = metrics.histogram(
            f"{prefix}_queue_wait_seconds",
            f"Between publishing and first delivery of {stage} jobs, by the clocks of broker and worker.",
        )
        self.duration = metrics.histogram(
            f"{prefix}_job_duration_seconds",
            f"Between delivery of {stage} jobs and their end in this worker, whatever became of them.",
        )
        self.slots = metrics.shown_gauge(
            f"{prefix}_slots", f"{stage.capitalize()} jobs that this worker takes at once."
        )
        self.busy = metrics.shown_gauge(
            f"{prefix}_busy_slots", f"{stage.capitalize()} jobs that it has now."
        )
        oldest = metrics.shown_gauge(
            f"{prefix}_oldest_job_seconds",
            f"Since the oldest {stage} job that this worker has was published; 0 without one.",
        )
        oldest.read = lambda: {(): self._oldest_s()}

    def show(self, account: Account, *, slots: int, busy: Callable[[], int]) -> None:
        """Where the jobs are counted."""
        self.jobs.read = lambda: {
            **self._none,
            **{(outcome,): n for outcome, n in account.ended.items()},
        }
        self.slots.read = lambda: {(): slots}
        self.busy.read = lambda: {(): busy()}

    @contextlib.contextmanager
    def job(self, *, published: float, attempt: int) -> Iterator[None]:
        """A job is in work here. A later delivery's wait holds an earlier one's work, so it is not noted."""
        if attempt == 1:
            self.wait.observe(max(0.0, time.time() - published))
        began = time.monotonic()
        self._published[published] += 1
        try:
            yield
        finally:
            self._published[published] -= 1
            if not self._published[published]:
                del self._published[published]
            self.duration.observe(time.monotonic() - began)

    def _oldest_s(self) -> float:
        return max(0.0, time.time() - min(self._published)) if self._published else 0.0


class EncodeMetrics:
    """How embeddings are made."""

    def __init__(self, metrics: MetricSet) -> None:
        self.made = metrics.shown_counter(
            "epd_encoder_items",
            "Items of encode jobs by outcome: encoded, hit (its embedding was there already), stale (a newer "
            "order of it is under way), unwanted (all who waited have gone).",
            ("outcome",),
        )
        self.media = metrics.histogram(
            "epd_encoder_media_duration_seconds",
            "Fetching an item's media from the media store and checking its key.",
        )
        self.encode = metrics.histogram(
            "epd_encoder_encode_duration_seconds",
            "An item in the engine: decoded, preprocessed, its turn at the tower, encoded, verified.",
            ("modality",),
        )
        self.publish = metrics.histogram(
            "epd_encoder_publish_duration_seconds",
            "Publishing an embedding in the arena, and copying it to other stores.",
        )
        self.batches = metrics.shown_histogram(
            "epd_encoder_batch_items",
            "Items that the engine's tower took at once: those whose encode one step finished.",
            buckets=BATCHES,
        )

    def note(self, modality: str, media_s: float, encode_s: float, publish_s: float) -> None:
        """An item was encoded, and took so long."""
        self.media.observe(media_s)
        self.encode.labels(modality).observe(encode_s)
        self.publish.observe(publish_s)


class StoreMetrics:
    """Embeddings at rest. Gateways show the arenas' sizes as well, by what workers tell them."""

    def __init__(self, metrics: MetricSet) -> None:
        self.moved = metrics.shown_counter(
            "epd_store_embedding_bytes",
            "Bytes of embeddings that this worker wrote to a store (arena, nixl, redis) or read from it; the "
            "arena is read by mapping, so no byte is copied, and nixl is another worker's memory.",
            ("store", "way"),
        )
        self.moves = metrics.shown_counter(
            "epd_store_embedding_items", "The same in embeddings.", ("store", "way")
        )
        self.evicted = metrics.shown_counter(
            "epd_store_evicted_items",
            "Embeddings that went to make room for one that this worker wrote.",
            ("store",),
        )
        self.faults = metrics.shown_counter(
            "epd_store_integrity_faults",
            "Embeddings that were damaged, of another model, or other than announced; each was dropped and "
            "ordered again.",
        )
        self.not_read = metrics.shown_counter(
            "epd_store_nixl_failed_reads",
            "Embeddings that were to be read by nixl and were not, so that the next store was tried: gone "
            "(the peer), late, unknown (the peer), incompatible, refused (the locator), stale (evicted), "
            "memory (none could be registered here).",
            ("reason",),
        )
        self.nixl = metrics.shown_gauge(
            "epd_store_nixl_bytes",
            "Registered memory: used by embeddings of this worker, region (what they may use), ready (files "
            "for what is to be read).",
            ("what",),
        )
        self.nixl_slots = metrics.shown_gauge(
            "epd_store_nixl_slots",
            "Embeddings in this worker's memory that others read now (leased), and such that were forgotten "
            "meanwhile (quarantined).",
            ("state",),
        )
        self.used = metrics.shown_gauge(
            "epd_store_arena_used_bytes", "Published embeddings in a node's arena.", ("node",)
        )
        self.quota = metrics.shown_gauge(
            "epd_store_arena_quota_bytes",
            "What a node's arena may hold before it evicts.",
            ("node",),
        )

    def show_nixl(self, counters: Counter[str], report: Callable[[], Mapping[str, int]]) -> None:
        """Where it is used: what its store counts and holds."""
        self.not_read.read = chosen(counters, {f"nixl_failed_{each}": each for each in REASONS})

        def bytes_of() -> Values:
            now = report()
            named = {"used": "bytes", "region": "region_bytes", "ready": "ready_bytes"}
            return {(what,): now[name] for what, name in named.items()}

        self.nixl.read = bytes_of
        self.nixl_slots.read = lambda: {
            (state,): report()[state] for state in ("leased", "quarantined")
        }


def chosen(counters: Counter[str], names: Mapping[str, str]) -> Callable[[], Values]:
    """Some counters, each under the label that it is shown as; what was never counted is 0."""
    return lambda: {(label,): counters[name] for name, label in names.items()}


def _sums(counters: Counter[str], sums: _Sums) -> Callable[[], Values]:
    return lambda: {labels: sum(counters[name] for name in names) for labels, names in sums.items()}
