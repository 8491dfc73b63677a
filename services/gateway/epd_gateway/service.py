"""One gateway process, from its connections to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack

import uvicorn
from redis.asyncio import Redis

from epd_common.bus import Bus, Registry, announce, declare_streams
from epd_common.bus.micro import micro_service
from epd_common.errors import UnavailableError
from epd_common.ingest import Ingest, PictureChecker
from epd_common.lifecycle import wait_any
from epd_common.orders import Orders
from epd_common.protocol import WorkerRecord, WorkerState, subjects
from epd_common.replies import ReplyHub
from epd_common.requester import Requester
from epd_common.store import KeyStates, MediaStore, open_redis
from epd_gateway.app import Edge, build_app
from epd_gateway.auth import KeyRing
from epd_gateway.fetch import MediaFetcher
from epd_gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals are the service's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Connect, serve HTTP until ``stop``, let running requests finish, close."""
    async with AsyncExitStack() as stack:
        keys = await stack.enter_async_context(KeyRing(settings.api_keys, settings.api_keys_file))
        bus = await stack.enter_async_context(
            Bus(
                settings.nats_url,
                name=f"epd-gateway {settings.worker_id}",
                login=settings.nats_login(),
                inbox=subjects.inbox_prefix("gateway"),
            )
        )
        redis = await stack.enter_async_context(
            open_redis(settings.redis_url, ca=settings.redis_ca)
        )
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
                http="httptools",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(settings.drain_s),
                h11_max_incomplete_event_size=64 * 1024,
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
        url = f"http://{settings.host}:{listening.getsockname()[1]}"
        await stack.enter_async_context(
            announce(
                bus, lambda beat: _record(settings, edge, url, beat), every_s=settings.heartbeat_s
            )
        )
        logger.info("listening on %s; API keys: %s", url, "yes" if keys.required else "no")
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=[listening]), name="http")
            await wait_any(stop, bus.lost)
            edge.draining = True
            server.should_exit = True
            await serving
        if bus.lost.is_set():
            raise UnavailableError("the connection to NATS is lost for good; the process ends")


async def _edge(
    stack: AsyncExitStack, settings: GatewaySettings, keys: KeyRing, bus: Bus, redis: Redis
) -> Edge:
    limits = settings.ingest_limits()
    media = MediaStore(redis, ttl_s=settings.media_ttl_s)
    pictures = await stack.enter_async_context(PictureChecker(limits))
    fetcher = await stack.enter_async_context(
        MediaFetcher(
            allowed=settings.media_allow_hosts,
            max_bytes=settings.max_media_bytes,
            timeout_s=settings.media_timeout_s,
        )
    )
    ingest = Ingest(media, pictures, limits, fetch=fetcher.fetch, files=media)
    states = KeyStates(redis, lease_s=settings.encode_lease_s, ready_ttl_s=settings.embedding_ttl_s)
    registry = await stack.enter_async_context(Registry(bus))
    hub = await stack.enter_async_context(ReplyHub(bus))
    requester = Requester(
        registry=registry, ingest=ingest, orders=Orders(bus, states, media), hub=hub
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
