"""Metrics: how they are kept, described and served."""

from __future__ import annotations

import asyncio
import re
import runpy
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY, Gauge
from prometheus_client.parser import text_string_to_metric_families

from epd_cli.stack import metrics_ports
from epd_common.accounts import Account
from epd_common.errors import UnavailableError
from epd_common.protocol import Item, Media
from epd_common.telemetry.exposition import serving_metrics
from epd_common.telemetry.metric_set import UNITS, MetricSet, Spec
from epd_common.telemetry.worker_metrics import WorkerMetrics
from epd_gateway.metrics import GatewayMetrics
from epd_pd.admission import Admission
from epd_pd.arrivals import Arrivals
from epd_pd.metrics import PdMetrics
from fake_engine import header
from service_stack import eventually

ROOT = Path(__file__).parents[1]
DOCS: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "write_docs.py"))
SPECS: list[Spec] = list(DOCS["described"]())
ADMITTED = "epd_pd_admitted_requests_total"


def samples(metrics: MetricSet) -> dict[tuple[str, ...], float]:
    """Values by name and those of the labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }


# -- what is described ---------------------------------------------------------------------------


def test_the_documented_metrics_are_those_of_the_code() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == DOCS["metrics"]()
    for metrics in (GatewayMetrics(), WorkerMetrics("encoder"), WorkerMetrics("pd")):
        PdMetrics(metrics)
        kept = {family.name for family in metrics.registry.collect()}
        kept = {name for name in kept if name.startswith("epd_")}
        assert kept == {spec.name.removesuffix("_total") for spec in metrics.specs}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_each_metric_says_what_it_is_in_and_what_it_means(spec: Spec) -> None:
    assert re.fullmatch("epd_(gateway|encoder|pd|store)_[a-z_]+", spec.name)
    assert (spec.kind == "counter") == spec.name.endswith("_total")
    assert spec.unit
    if spec.kind != "counter":
        assert spec.name.rpartition("_")[2] in UNITS
    if spec.kind == "histogram":
        assert spec.unit in ("seconds", "items")
    assert re.fullmatch(r"[A-Z0-9].{15,}\.", spec.meaning), spec.meaning


def test_a_name_without_a_unit_is_refused() -> None:
    metrics = MetricSet()
    metrics.gauge("epd_pd_cost", "What it costs.")
    with pytest.raises(KeyError, match="cost"):
        _ = metrics.specs[0].unit


# -- what is kept elsewhere ----------------------------------------------------------------------


def test_shown_values_are_those_of_now() -> None:
    metrics = MetricSet()
    counts: Counter[str] = Counter()
    shown = metrics.shown_counter("epd_pd_rescues", "Rescues.", ("kind",))
    assert samples(metrics) == {}
    shown.read = lambda: {("lost",): counts["lost"]}
    assert samples(metrics) == {("epd_pd_rescues_total", "lost"): 0}
    counts["lost"] += 2
    assert samples(metrics) == {("epd_pd_rescues_total", "lost"): 2}


def test_counted_numbers_make_a_histogram() -> None:
    metrics = MetricSet()
    shown = metrics.shown_histogram("epd_encoder_batch_items", "Items.", buckets=(1, 2, 4))
    shown.read = lambda: {1: 3, 3: 2, 9: 1}
    name = "epd_encoder_batch_items"
    assert samples(metrics) == {
        (f"{name}_bucket", "1.0"): 3,
        (f"{name}_bucket", "2.0"): 3,
        (f"{name}_bucket", "4.0"): 5,
        (f"{name}_bucket", "+Inf"): 6,
        (f"{name}_count",): 6,
        (f"{name}_sum",): 18,
    }


def test_a_worker_shows_what_its_parts_count() -> None:
    metrics = WorkerMetrics("pd")
    counters = Counter(
        encoded=3, embedding_bytes=300, hits=1, stale=2, redis_fetches=2, redis_fetched_bytes=200
    )
    counters.update(arena_hits=5, arena_read_bytes=500, integrity_faults=1, given_back=4)
    metrics.show_counters(counters)
    metrics.show_state(lambda: "draining")
    found = samples(metrics)
    assert found["epd_encoder_items_total", "encoded"] == 3
    assert found["epd_encoder_items_total", "hit"] == 1
    assert found["epd_encoder_items_total", "stale"] == 2
    assert found["epd_encoder_items_total", "unwanted"] == 0
    moved = "epd_store_embedding_bytes_total"
    assert found[moved, "arena", "written"] == 500, "encoded here, and brought from Valkey"
    assert found[moved, "arena", "read"] == 500
    assert found[moved, "redis", "read"] == 200
    assert found[moved, "redis", "written"] == 0
    assert found["epd_store_embedding_items_total", "arena", "written"] == 5
    assert found["epd_store_integrity_faults_total",] == 1
    assert found["epd_pd_given_back_jobs_total",] == 4
    states = {
        state: found["epd_pd_state", state] for state in ("starting", "ready", "draining", "failed")
    }
    assert states == {"starting": 0, "ready": 0, "draining": 1, "failed": 0}


def test_jobs_of_a_stage() -> None:
    metrics = WorkerMetrics("pd")
    stage, account = metrics.stages["generate"], Account()
    stage.show(account, slots=7, busy=lambda: 2)
    assert samples(metrics)["epd_pd_oldest_job_seconds",] == 0
    ago = time.time() - 100
    with stage.job(published=ago, attempt=1), stage.job(published=ago + 60, attempt=2):
        assert 100 <= samples(metrics)["epd_pd_oldest_job_seconds",] < 110
    account.enter().end("answered")
    found = samples(metrics)
    assert found["epd_pd_oldest_job_seconds",] == 0
    assert found["epd_pd_queue_wait_seconds_count",] == 1, "that of a later delivery is none"
    assert 100 <= found["epd_pd_queue_wait_seconds_sum",] < 110
    assert found["epd_pd_job_duration_seconds_count",] == 2
    assert found["epd_pd_jobs_total", "answered"] == 1
    assert found["epd_pd_jobs_total", "given_up"] == 0, "shown before it happens"
    assert (found["epd_pd_slots",], found["epd_pd_busy_slots",]) == (7, 2)


def test_workers_of_one_machine_get_ports_of_their_own() -> None:
    ports = metrics_ports({"EPD_METRICS_PORT": "9464"})
    assert [next(ports), next(ports)] == [
        {"EPD_METRICS_PORT": "9464"},
        {"EPD_METRICS_PORT": "9465"},
    ]
    for value in ({}, {"EPD_METRICS_PORT": "0"}, {"EPD_METRICS_PORT": "many"}):
        assert next(metrics_ports(value)) == {}, "each service says itself what it thinks of that"


# -- from an item that is ready to the engine ----------------------------------------------------


async def test_times_from_ready_to_the_engine_and_to_the_first_data() -> None:
    metrics = WorkerMetrics("pd")
    pd = PdMetrics(metrics)
    items = [Item(media=Media(ref="a"), key=letter * 64) for letter in "ab"]
    arrivals = Arrivals(items)
    pd.first_data(arrivals)  # of a request without items, or one whose items were never pinned
    now = time.monotonic()
    for index, known in ((1, now - 3), (0, now - 10)):
        arrivals.marks[index].ready = known
        arrivals.arrive(index, header(items[index].key, b"", "f"))
    pd.told(arrivals)
    pd.told(arrivals)  # of nothing new
    pd.first_data(arrivals)
    found = samples(metrics)
    assert found["epd_pd_ready_to_engine_seconds_count",] == 2
    assert 13 <= found["epd_pd_ready_to_engine_seconds_sum",] < 14
    assert found["epd_pd_ready_to_first_data_seconds_count",] == 1
    assert 3 <= found["epd_pd_ready_to_first_data_seconds_sum",] < 4


async def test_requests_inside_and_outside() -> None:
    admission = Admission(max_incomplete=1)
    items = [Item(media=Media(ref="a"), key="a" * 64)]
    head = header(items[0].key, b"", "f")

    def seen() -> tuple[int, int, int, int]:
        return (
            admission.inside,
            admission.outside,
            admission.entered_early,
            admission.entered_complete,
        )

    async def run(arrivals: Arrivals, inside: asyncio.Event) -> None:
        async with admission.enter(arrivals, text_before=1000):
            inside.set()
            await arrivals.settled()

    first, second = Arrivals(items), Arrivals(items)
    for arrivals in (first, second):
        arrivals.forecast(0, head.metadata)
    entered = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(run(first, entered))
        await entered.wait()
        group.create_task(run(second, asyncio.Event()))
        await eventually(lambda: admission.outside == 1, "the second waits")
        assert seen() == (1, 1, 1, 0)
        second.arrive(0, head)
        await eventually(lambda: admission.outside == 0, "it is in")
        first.arrive(0, head)
    assert seen() == (0, 0, 1, 1)


# -- /metrics of a worker ------------------------------------------------------------------------


async def test_a_worker_serves_its_metrics_and_those_of_vllm() -> None:
    metrics = WorkerMetrics("encoder")
    engines = Gauge("vllm:num_requests_running", "As vLLM registers it.")
    try:
        engines.set(3)
        async with serving_metrics(metrics.registry, host="127.0.0.1", port=0) as port:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                page = await client.get("/metrics")
                assert page.status_code == 200
                assert page.headers["content-type"].startswith("text/plain; version=")
                assert (await client.get("/")).status_code == 404
                assert (await client.post("/metrics")).status_code == 405
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"x" * 20_000)  # no request at all
            assert await asyncio.wait_for(reader.read(), 4) == b""
            writer.close()
            await writer.wait_closed()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
    finally:
        REGISTRY.unregister(engines)
    names = {family.name for family in text_string_to_metric_families(page.text)}
    assert {"vllm:num_requests_running", "epd_encoder_start_time_seconds"} <= names
    assert not [name for name in names if name.startswith(("python_", "process_"))]


async def test_a_port_in_use_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError, match=rf"127.0.0.1:{port} .*EPD_METRICS_PORT"):
            async with serving_metrics(MetricSet().registry, host="127.0.0.1", port=port):
                pass
