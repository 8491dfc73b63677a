"""Grafana's dashboards, from which ``deploy/observability/dashboards`` is written.

A panel is a title, what it means, and its queries; where it stands and how Grafana wants to be told that is
worked out here. ``scripts/write_docs.py`` writes the files, and a test runs every query on a real Prometheus.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

SOURCE = {"type": "prometheus", "uid": "prometheus"}
COLUMNS = 24
HEIGHTS = {"stat": 4, "timeseries": 8}


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


_TTFT = "epd_gateway_time_to_first_token_seconds"
_FAILED = 'epd_gateway_requests_total{status=~"5.."}'
_REFUSED = 'epd_gateway_requests_total{status="429"}'

_STAGES = (
    ("1 encode job queued", "epd_encoder_queue_wait_seconds"),
    ("2 media fetched", "epd_encoder_media_duration_seconds"),
    ("3 encoded", "epd_encoder_encode_duration_seconds"),
    ("4 published", "epd_encoder_publish_duration_seconds"),
    ("5 ready, engine told", "epd_pd_ready_to_engine_seconds"),
    ("6 ready, first data", "epd_pd_ready_to_first_data_seconds"),
)

OVERVIEW = (
    Panel(
        "Requests",
        "Requests that ended, a second.",
        ((f"{per_s('epd_gateway_requests_total')}", ""),),
        "reqps",
        "stat",
        4,
    ),
    Panel(
        "Failed",
        "Share of requests that ended with 5xx.",
        ((f"({per_s(_FAILED)} or vector(0)) / {per_s('epd_gateway_requests_total')}", ""),),
        "percentunit",
        "stat",
        4,
    ),
    Panel(
        "First token, p95",
        "From a request's arrival to the first byte of its answer.",
        ((quantile(0.95, _TTFT), ""),),
        "s",
        "stat",
        4,
    ),
    Panel(
        "Open requests",
        "Requests being answered now, by all gateways.",
        (("sum(epd_gateway_open_requests)", ""),),
        "short",
        "stat",
        4,
    ),
    Panel(
        "Encoders ready",
        "Encoders that take jobs.",
        (('sum(epd_encoder_state{state="ready"})', ""),),
        "short",
        "stat",
        4,
    ),
    Panel(
        "PD workers ready",
        "PD workers that take jobs.",
        (('sum(epd_pd_state{state="ready"})', ""),),
        "short",
        "stat",
        4,
    ),
    Panel(
        "Requests by status",
        "499: the client went away.",
        ((per_s("epd_gateway_requests_total", "status"), "{{status}}"),),
        "reqps",
    ),
    Panel("Time to first token", "As clients see it.", quantiles(_TTFT), "s"),
    Panel(
        "Duration of requests",
        "From a request's arrival to its end.",
        quantiles("epd_gateway_request_duration_seconds"),
        "s",
    ),
    Panel(
        "Jobs that are not done",
        "Queued or in work. More than the slots of a stage: they wait, and more workers of it help.",
        (("max by (stage) (sum by (instance, stage) (epd_gateway_queue_jobs))", "{{stage}}"),),
    ),
    Panel(
        "Slots and jobs in work",
        "By role, of ready workers.",
        (
            (
                "max by (role) (sum by (instance, role) (epd_gateway_worker_slots))",
                "{{role}}: slots",
            ),
            (
                "max by (role) (sum by (instance, role) (epd_gateway_worker_busy_slots))",
                "{{role}}: in work",
            ),
        ),
    ),
    Panel(
        "Wait in the queues, p95",
        "From a job's publishing to its first delivery.",
        (
            (quantile(0.95, "epd_encoder_queue_wait_seconds"), "encode"),
            (quantile(0.95, "epd_pd_queue_wait_seconds"), "generate"),
        ),
        "s",
    ),
    Panel(
        "Oldest job",
        "Age of the oldest job of a stage that is not done, in work or not.",
        (("max by (stage) (epd_gateway_queue_oldest_seconds)", "{{stage}}"),),
        "s",
    ),
    Panel(
        "Cost of open requests",
        "Weighted tokens, and how many may be open before requests are refused with 429.",
        (
            ("max by (model) (epd_gateway_open_cost_tokens)", "{{model}}: open"),
            ("max by (model) (epd_gateway_admission_capacity_tokens)", "{{model}}: capacity"),
        ),
    ),
    Panel(
        "Hand-over, p95",
        "From the publishing of a decode job to its first token, where PD workers have roles.",
        ((quantile(0.95, "epd_pd_handover_seconds"), "p95"),),
        "s",
        where="roles",
    ),
    Panel(
        "Hand-overs",
        "Decode jobs, a second; those whose keys and values were lost are prefilled once more.",
        ((per_s("epd_pd_kv_requests_total", "how"), "{{how}}"),),
        "ops",
    ),
    Panel(
        "Workers by state",
        "starting, ready, draining, failed.",
        (
            ("sum by (state) (epd_encoder_state)", "encoders {{state}}"),
            ("sum by (state) (epd_pd_state)", "PD {{state}}"),
        ),
    ),
)

STAGES = (
    Panel(
        "Mean time of each stage",
        "What an image goes through, one after another; the last two are a request's.",
        tuple((mean(metric), name) for name, metric in _STAGES),
        "s",
        width=12,
    ),
    Panel(
        "p95 of each stage",
        "The same, for the slow ones.",
        tuple((quantile(0.95, metric), name) for name, metric in _STAGES),
        "s",
        width=12,
    ),
    Panel(
        "Encode, by modality, p95",
        "In the engine: decoded, preprocessed, its turn, encoded, verified.",
        ((quantile(0.95, "epd_encoder_encode_duration_seconds", "modality"), "{{modality}}"),),
        "s",
    ),
    Panel(
        "Items in a batch, mean",
        "What the tower takes at once. 1 under load: encoders have too little to batch, or take too little "
        "ahead (EPD_ENCODE_AHEAD_S).",
        ((mean("epd_encoder_batch_items"), "items"),),
    ),
    Panel(
        "Encodes and generates",
        "Jobs that ended, a second, by what became of them.",
        (
            (per_s("epd_encoder_jobs_total", "outcome"), "encode {{outcome}}"),
            (per_s("epd_pd_jobs_total", "outcome"), "generate {{outcome}}"),
        ),
        "ops",
    ),
    Panel(
        "In the queue, p95",
        "Which stage lacks workers.",
        (
            (quantile(0.95, "epd_encoder_queue_wait_seconds"), "encode"),
            (quantile(0.95, "epd_pd_queue_wait_seconds"), "generate"),
        ),
        "s",
    ),
    Panel(
        "In a worker, p95",
        "From a job's delivery to its end there.",
        (
            (quantile(0.95, "epd_encoder_job_duration_seconds"), "encode"),
            (quantile(0.95, "epd_pd_job_duration_seconds"), "generate"),
        ),
        "s",
    ),
    Panel(
        "Items as PD workers find them",
        "Ready ones were encoded before, or in time.",
        ((per_s("epd_pd_items_total", "found"), "{{found}}"),),
        "ops",
    ),
    Panel(
        "Requests into the engine",
        "Early: with embeddings still missing.",
        ((per_s("epd_pd_admitted_requests_total", "how"), "{{how}}"),),
        "ops",
    ),
    Panel(
        "Requests that wait for embeddings",
        "Inside the engine they take one of EPD_MAX_INCOMPLETE slots.",
        (("sum by (where) (epd_pd_incomplete_requests)", "{{where}}"),),
    ),
    Panel(
        "Tokens before PD workers",
        "To be prefilled, and 64 for each answer that is being told.",
        (("epd_pd_backlog_tokens", "{{instance}}"),),
    ),
    Panel(
        "Steps of the engines",
        "A worker that has work and takes none hangs.",
        (
            ("rate(epd_encoder_engine_steps_total[$__rate_interval])", "encoder {{instance}}"),
            ("rate(epd_pd_engine_steps_total[$__rate_interval])", "PD {{instance}}"),
        ),
        "ops",
    ),
    Panel(
        "vLLM: requests in the engine",
        "As vLLM itself counts them.",
        (
            ("sum by (instance) (vllm:num_requests_running)", "{{instance}} running"),
            ("sum by (instance) (vllm:num_requests_waiting)", "{{instance}} waiting"),
        ),
        where="vllm",
    ),
    Panel(
        "vLLM: KV cache in use",
        "Near 100 %: requests are preempted, and wait.",
        (('max by (instance) (vllm:kv_cache_usage_perc{job="pd"})', "{{instance}}"),),
        "percentunit",
        where="vllm",
    ),
)

STORES = (
    Panel(
        "Arenas",
        "A full one evicts what was not used for longest, which is as it should be.",
        (
            ("max by (node) (epd_store_arena_used_bytes)", "{{node}}: used"),
            ("max by (node) (epd_store_arena_quota_bytes)", "{{node}}: quota"),
        ),
        "bytes",
    ),
    Panel(
        "Bytes of embeddings",
        "Written to and read from each store; what is read from the arena is mapped, not copied.",
        ((per_s("epd_store_embedding_bytes_total", "store, way"), "{{store}} {{way}}"),),
        "Bps",
    ),
    Panel(
        "Embeddings",
        "The same in embeddings.",
        ((per_s("epd_store_embedding_items_total", "store, way"), "{{store}} {{way}}"),),
        "ops",
    ),
    Panel(
        "Items of requests, by origin",
        "Encoded for the request, shared with an encode under way (single flight), or reused from a store.",
        ((per_s("epd_gateway_items_total", "origin"), "{{origin}}"),),
        "ops",
    ),
    Panel(
        "Encodes saved",
        "Share of items that were shared or reused.",
        (
            (
                '(sum(rate(epd_gateway_items_total{origin=~"shared|reused"}[$__rate_interval])) or vector(0))'
                f" / {per_s('epd_gateway_items_total')}",
                "saved",
            ),
        ),
        "percentunit",
    ),
    Panel(
        "Encode jobs by outcome",
        "Hit: it was there already. Stale and unwanted ones cost no encode.",
        ((per_s("epd_encoder_items_total", "outcome"), "{{outcome}}"),),
        "ops",
    ),
    Panel(
        "Evicted",
        "Embeddings that made room for others.",
        ((per_s("epd_store_evicted_items_total", "store"), "{{store}}"),),
        "ops",
    ),
    Panel(
        "Lost",
        "Announced, and gone when they were wanted: each is encoded again. More than a few: the stores are "
        "too small.",
        ((per_s("epd_pd_lost_items_total"), "lost"),),
        "ops",
    ),
    Panel(
        "Tenants over their bytes",
        "Media and bodies that were refused.",
        ((per_s("epd_gateway_media_refused_total", "tenant"), "{{tenant}}"),),
        "ops",
        where="faults",
    ),
)

FAULTS = (
    Panel(
        "Failed requests",
        "By status, 5xx alone.",
        ((per_s(_FAILED, "status"), "{{status}}"),),
        "reqps",
        where="faults",
    ),
    Panel(
        "Refused requests",
        "429: too much is open or queued, or a tenant is over its share.",
        ((per_s(_REFUSED), "429"),),
        "reqps",
        where="faults",
    ),
    Panel(
        "Requests by end",
        "answered, failed (5xx), refused (4xx), cancelled.",
        ((per_s("epd_gateway_ended_total", "outcome"), "{{outcome}}"),),
        "reqps",
    ),
    Panel(
        "Rescues",
        "Items that did not come as they should, by what was done; gave_up cost a request.",
        ((per_s("epd_pd_rescues_total", "kind"), "{{kind}}"),),
        "ops",
    ),
    Panel(
        "Jobs given back",
        "To their queue: a worker was shut down, its engine failed, or a broker did not answer it.",
        (
            (per_s("epd_encoder_given_back_jobs_total"), "encode"),
            (per_s("epd_pd_given_back_jobs_total"), "generate"),
        ),
        "ops",
    ),
    Panel(
        "Damaged embeddings",
        "Dropped, and ordered again.",
        ((per_s("epd_store_integrity_faults_total"), "faults"),),
        "ops",
    ),
    Panel(
        "Answers resumed, requesters lost",
        "Streams that went on with another worker, and requests whose gateway had died.",
        (
            (per_s("epd_pd_resumed_requests_total"), "resumed"),
            (per_s("epd_pd_orphaned_requests_total"), "orphaned"),
        ),
        "ops",
    ),
    Panel(
        "Wrong forecasts, jobs of others",
        "Prompts that were begun anew, and jobs that were meant for another worker.",
        (
            (per_s("epd_pd_wrong_forecasts_total"), "wrong forecasts"),
            (per_s("epd_pd_from_others_jobs_total"), "from others"),
        ),
        "ops",
    ),
    Panel(
        "Ledger and scrapes",
        "1 is well. Ledger 0: Valkey does not answer the gateway.",
        (
            ("min(epd_gateway_ledger_reachable)", "ledger"),
            ("min by (job) (up)", "{{job}}"),
        ),
    ),
    Panel(
        "Age of processes",
        "A saw-tooth is a worker that dies again and again.",
        (
            ("time() - epd_encoder_start_time_seconds", "encoder {{instance}}"),
            ("time() - epd_pd_start_time_seconds", "PD {{instance}}"),
        ),
        "s",
    ),
    Panel(
        "Engines that have work",
        "1 while an engine has something to compute. Compare with their steps.",
        (
            ("epd_encoder_engine_owes", "encoder {{instance}}"),
            ("epd_pd_engine_owes", "PD {{instance}}"),
        ),
    ),
    Panel(
        "Alerts",
        "Those that fire now.",
        (('ALERTS{alertstate="firing"}', "{{alertname}}"),),
        where="faults",
    ),
)

DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "overview": ("epdflow: overview", OVERVIEW),
    "stages": ("epdflow: a request's stages", STAGES),
    "stores": ("epdflow: stores", STORES),
    "faults": ("epdflow: faults", FAULTS),
}
"""Title and panels, by the file's name."""


def dashboard(name: str) -> str:
    """The JSON of one dashboard."""
    title, panels = DASHBOARDS[name]
    placed: list[dict[str, Any]] = []
    x = y = height = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > COLUMNS:
            x, y, height = 0, y + height, 0
        placed.append(_panel(number, panel, x, y))
        x, height = x + panel.width, max(height, HEIGHTS[panel.kind])
    document = {
        "uid": f"epdflow-{name}",
        "title": title,
        "tags": ["epdflow"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "tags": ["epdflow"],
                "title": "epdflow",
                "asDropdown": False,
                "includeVars": False,
                "keepTime": True,
                "targetBlank": False,
            }
        ],
        "templating": {"list": []},
        "annotations": {"list": []},
        "panels": placed,
    }
    return json.dumps(document, indent=1) + "\n"


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
        options: dict[str, Any] = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHTS[panel.kind]},
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend or "__auto",
            }
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }
