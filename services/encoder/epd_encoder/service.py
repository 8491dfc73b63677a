"""One encoder process, from its connections to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from epd_common.bus import Bus, JobPuller, declare_consumers, declare_streams
from epd_common.engines import EncoderEngine
from epd_common.protocol import Locator
from epd_common.store import (
    Arena,
    EmbeddingStore,
    KeyStates,
    MediaStore,
    RedisEmbeddingStore,
    open_redis,
)
from epd_common.worker import Worker
from epd_encoder.jobs import EncodeHandler
from epd_encoder.settings import EncoderSettings

logger = logging.getLogger(__name__)


class EncoderService:
    """Connects, loads the engine, works until it is told to stop, and gives back what it did not do.

    Args:
        make_engine: Builds the engine for the arena's staging folder of this worker.
    """

    def __init__(
        self, settings: EncoderSettings, make_engine: Callable[[Path], EncoderEngine]
    ) -> None:
        self._settings = settings
        self._make_engine = make_engine

    async def run(self, stop: asyncio.Event) -> None:
        settings = self._settings
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(
                Bus(settings.nats_url, name=f"epd-encoder {settings.worker_id}")
            )
            redis = await stack.enter_async_context(open_redis(settings.redis_url))
            await declare_streams(bus, max_jobs=settings.queue_max_jobs)
            arena = Arena(
                settings.arena_dir, quota_bytes=settings.arena_bytes, worker=settings.worker_id
            )
            arena.open()
            stack.callback(arena.close)
            worker = Worker(bus, settings, role="encoder", slots=settings.encoder_slots)
            await stack.enter_async_context(worker)

            engine = self._make_engine(arena.staging)
            stack.push_async_callback(engine.stop)
            info = await worker.load(engine)

            states = KeyStates(
                redis, lease_s=settings.encode_lease_s, ready_ttl_s=settings.embedding_ttl_s
            )
            stores: dict[str, EmbeddingStore] = {}
            if "redis" in settings.stores:
                stores["redis"] = RedisEmbeddingStore(redis, ttl_s=settings.embedding_ttl_s)
            handler = EncodeHandler(
                bus=bus,
                engine=engine,
                info=info,
                arena=arena,
                remote=list(stores.values()),
                locators=[
                    Locator(store=name, node=settings.node if name == "arena" else "")
                    for name in settings.stores
                ],
                media=MediaStore(redis, ttl_s=settings.media_ttl_s),
                states=states,
                worker=settings.worker_id,
                counters=worker.counters,
            )
            consumers = await declare_consumers(bus, "encode", settings.model_name)
            puller = JobPuller(
                bus,
                "encode",
                consumers=consumers,
                slots=settings.encoder_slots,
                worker=settings.worker_id,
            )
            await stack.enter_async_context(puller)
            await worker.work(puller, handler.handle, stop)
