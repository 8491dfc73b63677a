"""One PD process, from its connections to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from epd_common.bus import Bus, JobPuller, declare_consumers, declare_streams
from epd_common.engines import PdEngine
from epd_common.ingest import Ingest, PictureChecker
from epd_common.orders import Orders
from epd_common.store import (
    Arena,
    EmbeddingStore,
    KeyStates,
    MediaStore,
    RedisEmbeddingStore,
    SizeTable,
    open_redis,
)
from epd_common.worker import Worker
from epd_pd.admission import Admission
from epd_pd.cancels import Cancels
from epd_pd.jobs import GenerateHandler
from epd_pd.pins import Pins
from epd_pd.readiness import Readiness
from epd_pd.settings import PdSettings


class PdService:
    """Connects, loads the engine, works until it is told to stop, and gives back what it did not do.

    Args:
        make_engine: Builds the engine for the arena's pin folder of this worker.
    """

    def __init__(self, settings: PdSettings, make_engine: Callable[[Path], PdEngine]) -> None:
        self._settings = settings
        self._make_engine = make_engine

    async def run(self, stop: asyncio.Event) -> None:
        settings = self._settings
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(
                Bus(settings.nats_url, name=f"epd-pd {settings.worker_id}")
            )
            redis = await stack.enter_async_context(open_redis(settings.redis_url))
            await declare_streams(bus, max_jobs=settings.queue_max_jobs)
            arena = Arena(
                settings.arena_dir, quota_bytes=settings.arena_bytes, worker=settings.worker_id
            )
            arena.open()
            stack.callback(arena.close)
            worker = Worker(bus, settings, role="pd", slots=settings.pd_slots)
            await stack.enter_async_context(worker)
            cancels = await stack.enter_async_context(Cancels(bus))

            engine = self._make_engine(arena.pins)
            stack.push_async_callback(engine.stop)
            info = await worker.load(engine)

            states = KeyStates(
                redis, lease_s=settings.encode_lease_s, ready_ttl_s=settings.embedding_ttl_s
            )
            media = MediaStore(redis, ttl_s=settings.media_ttl_s)
            remote: list[EmbeddingStore] = []
            if "redis" in settings.stores:
                remote.append(RedisEmbeddingStore(redis, ttl_s=settings.embedding_ttl_s))
            orders = Orders(bus, states, media)
            limits = settings.ingest_limits()
            pictures = await stack.enter_async_context(PictureChecker(limits))
            handler = GenerateHandler(
                bus=bus,
                engine=engine,
                info=info,
                # URLs are the gateway's to fetch, under its limits; here media come inline.
                ingest=Ingest(media, pictures, limits, fetch=None, files=media),
                media=media,
                readiness=Readiness(
                    bus,
                    orders,
                    Pins(arena, remote, fingerprint=info.fingerprint, counters=worker.counters),
                    SizeTable(redis, info.fingerprint),
                    attempts=settings.encode_attempts,
                    recheck_s=settings.recheck_s,
                    counters=worker.counters,
                ),
                admission=Admission(settings.max_incomplete),
                cancels=cancels,
                worker=settings.worker_id,
                deadline_s=settings.deadline_s,
                counters=worker.counters,
            )
            consumers = await declare_consumers(bus, "generate", settings.model_name)
            puller = JobPuller(
                bus,
                "generate",
                consumers=consumers,
                slots=settings.pd_slots,
                worker=settings.worker_id,
            )
            await stack.enter_async_context(puller)
            await worker.work(puller, handler.handle, stop)
