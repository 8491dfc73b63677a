"""One encoder process, from its connections to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from epd_common.bus.exhausted import burying_exhausted
from epd_common.connections import connect
from epd_common.encode import EncodeHandler
from epd_common.engines import EncoderEngine
from epd_encoder.settings import EncoderSettings


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
            parts = await connect(
                stack, settings, role="encoder", slots=settings.encoder_slots, stop=stop
            )
            engine = self._make_engine(parts.arena.staging)
            stack.push_async_callback(parts.worker.stop_engine)
            info = await parts.worker.load(engine, takes_encodes=True)
            handler = EncodeHandler(parts.encoding(engine, info), parts.worker.counters)
            await stack.enter_async_context(
                burying_exhausted(parts.bus, "encode", handler.exhausted)
            )
            puller = await parts.pull(
                stack, "encode", slots=settings.encoder_slots, ahead_s=settings.encode_ahead_s
            )
            await parts.worker.work([(puller, handler.handle, handler.exhausted)], stop)
