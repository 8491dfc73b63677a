"""One encoder process, from its connections to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from epd_common.bus import JobPuller, declare_consumers
from epd_common.engines import EncoderEngine
from epd_common.protocol import Locator
from epd_common.worker import connect
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
            parts = await connect(stack, settings, role="encoder", slots=settings.encoder_slots)
            engine = self._make_engine(parts.arena.staging)
            stack.push_async_callback(engine.stop)
            info = await parts.worker.load(engine)
            handler = EncodeHandler(
                bus=parts.bus,
                engine=engine,
                info=info,
                arena=parts.arena,
                remote=parts.remote,
                locators=[
                    Locator(store=name, node=settings.node if name == "arena" else "")
                    for name in settings.stores
                ],
                media=parts.media,
                states=parts.states,
                worker=settings.worker_id,
                counters=parts.worker.counters,
            )
            consumers = await declare_consumers(parts.bus, "encode", settings.model_name)
            puller = JobPuller(
                parts.bus,
                "encode",
                consumers=consumers,
                slots=settings.encoder_slots,
                worker=settings.worker_id,
            )
            await stack.enter_async_context(puller)
            await parts.worker.work(puller, handler.handle, stop)
