"""Are requests answered, how fast, and is there room?"""

from __future__ import annotations

from epd_cli.dashboards.panel import FAILED, Panel, per_s, quantile, quantiles

_TTFT = "epd_gateway_time_to_first_token_seconds"

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
        ((f"({per_s(FAILED)} or vector(0)) / {per_s('epd_gateway_requests_total')}", ""),),
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
