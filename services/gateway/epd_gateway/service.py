"""One gateway process, from its connections to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack

import uvicorn
from redis.asyncio import Redis

from epd_common.brokers import open_brokers
from epd_common.bus import Bus, Registry, announce, declare_streams
from epd_common.bus.micro import micro_service
from epd_common.embedding_nodes import EmbeddingNodes
from epd_common.errors import UnavailableError
from epd_common.held_index import HeldIndex
from epd_common.ingest import Ingest, PictureChecker
from epd_common.lifecycle import wait_any
from epd_common.orders import Orders
from epd_common.placing import Placing
from epd_common.protocol import WorkerRecord, WorkerState, subjects
from epd_common.replies import ReplyHub
from epd_common.requester import Requester
from epd_common.store import KeyStates, Ledger, MediaQuotas, MediaStore, SizeTables
from epd_common.telemetry.traces import open_tracer
from epd_gateway.app import Edge, build_app
from epd_gateway.auth import KeyRing
from epd_gateway.door import Door
from epd_gateway.fetch import MediaFetcher
from epd_gateway.http_limits import BoundedHttp
from epd_gateway.live import explaining
from epd_gateway.metrics import GatewayMetrics
from epd_gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""An idle connection stays open for longer than clients keep theirs (5 s, 15 s): else one of them sends a
request on a connection that is just being closed, and cannot know whether it was taken."""

CLOSE_S = 2
"""Seconds beyond ``EPD_DRAIN_S`` in which the last answers, errors then, are sent."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals are the service's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Connect, serve HTTP until ``stop``, give notice, let running requests finish, close."""
    async with AsyncExitStack() as stack:
        keys = await stack.enter_async_context(KeyRing(settings.api_keys, settings.api_keys_file))
        bus, redis = await open_brokers(stack, settings, role="gateway", stop=stop)
        await declare_streams(
            bus, max_jobs=settings.queue_max_jobs, replicas=settings.nats_replicas
        )
        edge = await _edge(stack, settings, keys, bus, redis)
        listening = _listen(settings)
        stack.callback(listening.close)
        server = _Server(
            uvicorn.Config(
                build_app(edge),
                loop="none",  # this loop
                http=BoundedHttp,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nobody asks where a request comes from
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(settings.drain_s) + CLOSE_S,
            )
        )
        await stack.enter_async_context(
            micro_service(
                bus,
                role="gateway",
                worker=settings.worker_id,
                health=edge.health,
                audit=edge.audit,
            )
        )
        await stack.enter_async_context(explaining(bus, edge.trails, gateway=settings.worker_id))
        url = f"http://{settings.host}:{listening.getsockname()[1]}"
        beat_now = await stack.enter_async_context(
            announce(
                bus, lambda beat: _record(settings, edge, url, beat), every_s=settings.heartbeat_s
            )
        )
        logger.info("listening on %s; API keys: %s", url, "yes" if keys.required else "no")
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=[listening]), name="http")
            await wait_any(stop, bus.lost)
            edge.draining = True
            beat_now()
            if not bus.lost.is_set():
                logger.info("draining: not ready, still serving for %g s", settings.drain_notice_s)
                await wait_any(bus.lost, timeout_s=settings.drain_notice_s)
            server.should_exit = True
            await _finish(edge, serving, 0.0 if bus.lost.is_set() else settings.drain_s)
        if bus.lost.is_set():
            raise UnavailableError("the connection to NATS is lost for good; the process ends")


async def _finish(edge: Edge, serving: asyncio.Task[None], drain_s: float) -> None:
    """Let running requests end; those that do not within ``drain_s`` end with an error that says so."""
    logger.info("draining: %d requests are open", edge.hub.open_replies)
    await asyncio.wait((serving,), timeout=drain_s)
    if not serving.done():
        late = edge.hub.open_replies
        logger.warning(
            "%d requests did not finish within EPD_DRAIN_S; they end with an error", late
        )
        await edge.hub.fail_all(
            UnavailableError(
                "the gateway shut down before the answer was complete; send the request again",
                code="gateway_stopped",
                stage="reply",
                retry_after_s=1.0,
            )
        )
    await serving


async def _edge(
    stack: AsyncExitStack, settings: GatewaySettings, keys: KeyRing, bus: Bus, redis: Redis
) -> Edge:
    limits = settings.ingest_limits()
    metrics = GatewayMetrics()
    tracer = await stack.enter_async_context(
        open_tracer(
            settings.otlp_endpoint,
            sample=settings.trace_sample,
            service="epd-gateway",
            instance=settings.worker_id,
        )
    )
    quotas = MediaQuotas(
        redis,
        bound_bytes=settings.tenant_media_bytes,
        refused=lambda tenant: metrics.media_refused.labels(tenant).inc(),
    )
    if keys.required:
        bound = await quotas.bound.bytes()
        logger.info("bytes in the media store that a tenant may have: %s", bound or "any number")
    media = MediaStore(redis, ttl_s=settings.media_ttl_s, quotas=quotas)
    pictures = await stack.enter_async_context(PictureChecker(limits, several=lambda: keys.several))
    fetcher = await stack.enter_async_context(
        MediaFetcher(
            allowed=settings.media_allow_hosts,
            max_bytes=settings.max_media_bytes,
            timeout_s=settings.media_timeout_s,
            several=lambda: keys.several,
        )
    )
    ingest = Ingest(media, pictures, limits, fetch=fetcher.fetch, files=media)
    states = KeyStates(redis, lease_s=settings.encode_lease_s, ready_ttl_s=settings.embedding_ttl_s)
    registry = await stack.enter_async_context(Registry(bus))
    name = subjects.worker_key("gateway", settings.worker_id)
    hub = await stack.enter_async_context(ReplyHub(bus, name=name))
    requester = Requester(
        registry=registry,
        ingest=ingest,
        orders=Orders(bus, states, media),
        hub=hub,
        sizes=SizeTables(redis),
        name=name,
        placing=await _placing(stack, settings, bus, registry, metrics),
    )
    door = Door(
        settings,
        ledger=await stack.enter_async_context(Ledger(redis)),
        registry=registry,
        metrics=metrics,
        fair=lambda: keys.several,
    )
    return Edge(
        settings=settings,
        keys=keys,
        bus=bus,
        redis=redis,
        registry=registry,
        requester=requester,
        ingest=ingest,
        media=media,
        hub=hub,
        door=door,
        metrics=metrics,
        tracer=tracer,
    )


async def _placing(
    stack: AsyncExitStack,
    settings: GatewaySettings,
    bus: Bus,
    registry: Registry,
    metrics: GatewayMetrics,
) -> Placing | None:
    if settings.placement == "any":
        return None
    held, nodes = HeldIndex(), EmbeddingNodes()
    for subject, handler in (
        (subjects.held_subject("*"), held.on_message),
        (subjects.ready_subject("*"), nodes.on_message),
    ):
        await stack.enter_async_context(bus.listening(subject, handler))
    metrics.telling_workers.set_function(lambda: len(held.sizes()))
    metrics.held_beginnings.set_function(lambda: sum(held.sizes()))
    return Placing(
        registry,
        lambda outcome: metrics.placements.labels(outcome).inc(),
        held_by=held.held_by,
        nodes_of=nodes.nodes_of,
    )


def _listen(settings: GatewaySettings) -> socket.socket:
    try:
        return socket.create_server((settings.host, settings.port), backlog=2048)
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); "
            "set EPD_HOST and EPD_PORT"
        ) from error


def _record(settings: GatewaySettings, edge: Edge, url: str, beat: int) -> WorkerRecord:
    state: WorkerState = "draining" if edge.draining else "ready"
    return WorkerRecord(
        role="gateway",
        worker=settings.worker_id,
        node=settings.node,
        state=state,
        beat=beat,
        ttl_s=3 * settings.heartbeat_s,
        busy=edge.hub.open_replies,
        pid=os.getpid(),
        phase=url,
    )
