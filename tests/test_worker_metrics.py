"""What all services show of a few requests, and a port that is in use."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from epd_common.errors import UnavailableError
from epd_common.telemetry import exposition
from epd_common.telemetry.exposition import MOST_CONNECTIONS, serving_metrics
from service_stack import BOUND_S, eventually, picture, stream_text, text_of
from sim_stack import sim_stack


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield int(held.getsockname()[1])


def free_port() -> int:
    """One that was free just now."""
    with held_port() as port:
        return port


class Page:
    """What one process shows."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        found = [
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, (name, labels)
        return sum(found)


async def page(port: int) -> Page:
    async with httpx.AsyncClient() as client:
        return Page((await client.get(f"http://127.0.0.1:{port}/metrics")).text)


@pytest.mark.slow
async def test_what_services_show_of_a_few_requests(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with sim_stack(nats_url, redis_url, tmp_path) as stack:
        encoder_port, pd_port = free_port(), free_port()
        await stack.add_encoder(metrics_port=encoder_port)
        await stack.add_pd(metrics_port=pd_port)
        await stack.add_gateway()
        await stack.ready()
        first, second = picture((64, 64)), picture((64, 64))
        text_of(await stack.ask("what are they?", first, second))
        text_of(await stack.ask("who are you?"))
        async with stack.streaming("what is it?", first) as answer:
            assert stream_text((await answer.aread()).decode()).count(" ") > 1, "in pieces"

        async def idle() -> bool:
            return (await page(pd_port))("epd_pd_busy_slots") == 0

        await eventually(idle, "its last job is settled")
        encoder, pd = await page(encoder_port), await page(pd_port)
        gateway = Page((await stack.http.get("/metrics")).text)

    ids = {"worker": stack.encoders[0].id, "model": stack.model, "engine": "vllm"}
    assert encoder("epd_encoder_info", **ids) == 1
    assert encoder("epd_encoder_state", state="ready") == encoder("epd_encoder_state") == 1
    assert encoder("epd_encoder_items_total", outcome="encoded") == 2
    assert encoder("epd_encoder_items_total") == 2
    assert encoder("epd_encoder_jobs_total", outcome="ready") == 2
    assert encoder("epd_encoder_jobs_total") == 2
    for histogram in ("queue_wait", "job_duration", "encode_duration", "publish_duration"):
        assert encoder(f"epd_encoder_{histogram}_seconds_count") == 2
    assert encoder("epd_encoder_media_duration_seconds_count") == 2
    assert encoder("epd_encoder_batch_items_sum") == 2
    assert encoder("epd_encoder_engine_steps_total") == encoder("epd_encoder_batch_items_count")
    assert encoder("epd_encoder_slots") == 16
    written = encoder("epd_store_embedding_bytes_total", store="arena", way="written")
    assert written > 0
    assert encoder("epd_store_embedding_bytes_total", store="redis", way="written") == written
    assert encoder("epd_store_embedding_items_total", store="redis", way="written") == 2
    assert encoder("epd_store_arena_used_bytes") > written, "with headers"
    assert encoder("epd_store_arena_quota_bytes") > 0

    assert pd("epd_pd_jobs_total", outcome="answered") == pd("epd_pd_jobs_total") == 3
    assert pd("epd_pd_queue_wait_seconds_count") == 3
    assert pd("epd_pd_items_total") == 3
    assert pd("epd_pd_items_total", found="ready") >= 1, "that of the second request"
    assert pd("epd_pd_rescues_total") == pd("epd_pd_lost_items_total") == 0
    assert pd("epd_pd_admitted_requests_total") == 3
    assert pd("epd_pd_incomplete_requests") == 0
    assert pd("epd_pd_ready_to_engine_seconds_count") == 3
    assert pd("epd_pd_ready_to_first_data_seconds_count") == 2, "of those with items"
    assert pd("epd_pd_engine_steps_total") > 0
    read = pd("epd_store_embedding_items_total", store="arena", way="read")
    assert 2 <= read <= 3, "once for all requests that have it pinned at a time"
    moved = "epd_store_embedding_bytes_total"
    assert pd(moved, store="arena", way="read") == read * written / 2
    assert pd(moved, store="redis", way="read") == 0
    assert pd("epd_store_integrity_faults_total") == 0

    assert gateway("epd_gateway_items_total", origin="encoded") == 2
    assert gateway("epd_gateway_items_total", origin="reused") == 1
    assert gateway("epd_gateway_worker_slots", role="pd", model=stack.model) == 32


async def test_a_worker_whose_port_is_in_use_does_not_start(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with sim_stack(nats_url, redis_url, tmp_path) as stack:
        with held_port() as port:
            worker = await stack.add_encoder(metrics_port=port)
            with pytest.raises(UnavailableError, match="EPD_METRICS_PORT"):
                await worker.process.task
        stack.encoders.clear()


@pytest.mark.slow
async def test_a_client_that_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of them would keep a connection, and a page in memory, as long as it likes."""
    monkeypatch.setattr(exposition, "REQUEST_S", 0.2)
    registry = CollectorRegistry()
    many = Gauge("many", "More than a socket takes.", ["number"], registry=registry)
    for number in range(100_000):
        many.labels(str(number) * 20)
    async with serving_metrics(registry, host="127.0.0.1", port=0) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            await eventually(lambda: answers() == 1, "it is answered")
            await eventually(lambda: answers() == 0, "nobody waits for it")
            got = await asyncio.to_thread(all_of, client)
    head, _, body = got.partition(b"\r\n\r\n")
    assert int(head.rpartition(b"content-length: ")[2].split()[0]) > len(body)


async def test_clients_that_do_not_ask_keep_nobody_out() -> None:
    async with serving_metrics(CollectorRegistry(), host="127.0.0.1", port=0) as port:
        with contextlib.ExitStack() as idle:
            for _ in range(MOST_CONNECTIONS + 1):
                idle.enter_context(socket.create_connection(("127.0.0.1", port)))
            await eventually(lambda: answers() == MOST_CONNECTIONS, "as many as may be are open")
            async with httpx.AsyncClient() as client:
                asked = await client.get(f"http://127.0.0.1:{port}/metrics")
            assert asked.status_code == 200


def answers() -> int:
    """How many clients of pages of metrics are being answered."""
    return sum("_Page.answer" in repr(task.get_coro()) for task in asyncio.all_tasks())


def all_of(client: socket.socket) -> bytes:
    """What comes until the other side ends it, which must be soon."""
    client.settimeout(BOUND_S)
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(1 << 20):
            pieces.append(piece)
    return b"".join(pieces)
