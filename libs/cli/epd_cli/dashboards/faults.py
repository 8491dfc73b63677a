"""What failed, was rescued, given back, refused?"""

from __future__ import annotations

from epd_cli.dashboards.panel import FAILED, Panel, per_s

_REFUSED = 'epd_gateway_requests_total{status="429"}'

FAULTS = (
    Panel(
        "Failed requests",
        "By status, 5xx alone.",
        ((per_s(FAILED, "status"), "{{status}}"),),
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
