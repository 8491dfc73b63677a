"""Where does a request's time go?"""

from __future__ import annotations

from epd_cli.dashboards.panel import Panel, mean, per_s, quantile

_STAGES = (
    ("1 encode job queued", "epd_encoder_queue_wait_seconds"),
    ("2 media fetched", "epd_encoder_media_duration_seconds"),
    ("3 encoded", "epd_encoder_encode_duration_seconds"),
    ("4 published", "epd_encoder_publish_duration_seconds"),
    ("5 ready, engine told", "epd_pd_ready_to_engine_seconds"),
    ("6 ready, first data", "epd_pd_ready_to_first_data_seconds"),
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
