"""What encoder and PD processes work with: brokers, stores, the node's arena, the worker's own record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Literal

from redis.asyncio import Redis

from epd_common.brokers import open_brokers
from epd_common.bus import Bus, JobPuller, declare_consumers, declare_place, declare_streams
from epd_common.encode import Encoding
from epd_common.engines import EncoderEngine, EngineInfo
from epd_common.errors import EpdError
from epd_common.protocol import Locator, subjects
from epd_common.protocol.lanes import background_slots, lane_waits_s
from epd_common.protocol.subjects import Stage
from epd_common.protocol.workers import PdRole
from epd_common.settings import WorkerSettings
from epd_common.store import (
    Arena,
    KeyStates,
    MediaStore,
    RedisEmbeddingStore,
    RemoteStore,
    Suspects,
)
from epd_common.store.arena import sweeping
from epd_common.store.nixl import open_nixl
from epd_common.store.room import check_size
from epd_common.telemetry.exposition import serving_metrics
from epd_common.telemetry.traces import Tracer, open_tracer
from epd_common.telemetry.worker_metrics import WorkerMetrics
from epd_common.worker import Worker


@dataclass(frozen=True, slots=True)
class Connections:
    """What a worker process works with, open as long as its stack is."""

    settings: WorkerSettings
    bus: Bus
    redis: Redis
    arena: Arena
    worker: Worker
    states: KeyStates
    media: MediaStore
    remote: list[RemoteStore]
    tracer: Tracer

    def encoding(self, engine: EncoderEngine, info: EngineInfo) -> Encoding:
        """Makes embeddings with this worker's engine."""
        return Encoding(
            bus=self.bus,
            engine=engine,
            info=info,
            arena=self.arena,
            remote=self.remote,
            here=Locator(store=self.arena.name, node=self.settings.node)
            if self.arena.name in self.settings.stores
            else None,
            media=self.media,
            states=self.states,
            suspects=Suspects(self.redis),
            worker=self.settings.worker_id,
            tracer=self.tracer,
            counters=self.worker.counters,
            metrics=self.worker.metrics.encode,
        )

    async def pull(
        self,
        stack: AsyncExitStack,
        stage: Stage,
        *,
        slots: int,
        ahead_s: float = 0.0,
        load: Callable[[], int] | None = None,
        place: str = subjects.ANY_PLACE,
    ) -> JobPuller:
        """A puller of the model's queue, open as long as the stack is.

        Generate jobs of the background lane may take long; encodes do not, and get all slots. For generate
        jobs of any place there is, beside the lanes, a queue of those that are meant for this worker.
        """
        settings = self.settings
        lanes = await declare_consumers(self.bus, stage, settings.model_name, place)
        home: list[str] = []
        if stage == "generate" and place == subjects.ANY_PLACE:
            home = [await declare_place(self.bus, settings.model_name, settings.worker_id)]
        return await stack.enter_async_context(
            JobPuller(
                self.bus,
                stage,
                consumers=[*home, *lanes],
                waits_s=(*(0.0 for _ in home), *lane_waits_s(settings.lane_waits_s)),
                slots=slots,
                last_lane_slots=background_slots(slots) if stage == "generate" else slots,
                ahead_s=ahead_s,
                load=load,
                worker=settings.worker_id,
                home=bool(home),
            )
        )


async def connect(
    stack: AsyncExitStack,
    settings: WorkerSettings,
    *,
    role: Literal["encoder", "pd"],
    slots: int,
    stop: asyncio.Event,
    pd_role: PdRole = "pd",
) -> Connections:
    """Connect to the brokers, open this node's arena, and enter the registry as ``starting``; serve metrics
    from before all that, if that is wanted.

    Args:
        stop: Ends the wait for brokers that do not answer yet.
    """
    metrics = WorkerMetrics(role)
    if settings.metrics_port:
        await stack.enter_async_context(
            serving_metrics(
                metrics.registry, host=settings.metrics_host, port=settings.metrics_port
            )
        )
    tracer = await stack.enter_async_context(
        open_tracer(
            settings.otlp_endpoint,
            sample=settings.trace_sample,
            service=f"epd-{role}",
            instance=settings.worker_id,
        )
    )
    bus, redis = await open_brokers(stack, settings, role=role, stop=stop)
    await declare_streams(
        bus,
        max_jobs=settings.queue_max_jobs,
        replicas=settings.nats_replicas,
        update=False,
    )
    arena = _open_arena(settings)
    stack.callback(arena.close)
    await stack.enter_async_context(sweeping(arena))
    worker = await stack.enter_async_context(
        Worker(bus, settings, arena, role=role, slots=slots, metrics=metrics, pd_role=pd_role)
    )
    worker.shows("arena", arena.report)
    remote = [
        await _open_remote(stack, settings, name, redis, arena, worker)
        for name in settings.stores
        if name != arena.name
    ]
    return Connections(
        settings=settings,
        bus=bus,
        redis=redis,
        arena=arena,
        worker=worker,
        states=KeyStates(
            redis, lease_s=settings.encode_lease_s, ready_ttl_s=settings.embedding_ttl_s
        ),
        media=MediaStore(redis, ttl_s=settings.media_ttl_s),
        remote=remote,
        tracer=tracer,
    )


async def _open_remote(
    stack: AsyncExitStack,
    settings: WorkerSettings,
    name: str,
    redis: Redis,
    arena: Arena,
    worker: Worker,
) -> RemoteStore:
    if name == "nixl":
        nixl = await stack.enter_async_context(
            open_nixl(
                redis,
                arena,
                settings.nixl_options(),
                worker=settings.worker_id,
                counters=worker.counters,
            )
        )
        worker.shows(name, nixl.report)
        worker.metrics.store.show_nixl(worker.counters, nixl.report)
        return nixl
    store = RedisEmbeddingStore(
        redis,
        ttl_s=settings.embedding_ttl_s,
        bound_bytes=settings.redis_embedding_bytes,
        counters=worker.counters,
    )
    stack.push_async_callback(store.aclose)
    return store


def _open_arena(settings: WorkerSettings) -> Arena:
    arena = Arena(settings.arena_dir, quota_bytes=settings.arena_bytes, worker=settings.worker_id)
    try:
        settings.arena_dir.mkdir(parents=True, exist_ok=True)
        check_size(settings.arena_dir, settings.arena_bytes)
        arena.open()
    except OSError as error:
        raise EpdError(
            f"the arena {settings.arena_dir} cannot be used ({error.strerror}: {error.filename}): set "
            "EPD_ARENA_DIR to a folder on tmpfs that this user may write to",
            code="arena_unusable",
        ) from error
    return arena
