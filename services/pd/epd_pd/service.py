"""One PD process, from its connections to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from epd_common.bus import JobPuller, declare_consumers
from epd_common.engines import PdEngine
from epd_common.ingest import Ingest, PictureChecker
from epd_common.orders import Orders
from epd_common.store import SizeTable
from epd_common.worker import connect
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
            parts = await connect(stack, settings, role="pd", slots=settings.pd_slots)
            cancels = await stack.enter_async_context(Cancels(parts.bus))
            engine = self._make_engine(parts.arena.pins)
            stack.push_async_callback(engine.stop)
            info = await parts.worker.load(engine)

            limits = settings.ingest_limits()
            pictures = await stack.enter_async_context(PictureChecker(limits))
            counters = parts.worker.counters
            pins = Pins(parts.arena, parts.remote, fingerprint=info.fingerprint, counters=counters)
            handler = GenerateHandler(
                bus=parts.bus,
                engine=engine,
                info=info,
                # URLs are the gateway's to fetch, under its limits; here media come inline.
                ingest=Ingest(parts.media, pictures, limits, fetch=None, files=parts.media),
                media=parts.media,
                readiness=Readiness(
                    parts.bus,
                    Orders(parts.bus, parts.states, parts.media),
                    pins,
                    SizeTable(parts.redis, info.fingerprint),
                    attempts=settings.encode_attempts,
                    recheck_s=settings.recheck_s,
                    counters=counters,
                ),
                admission=Admission(settings.max_incomplete),
                cancels=cancels,
                worker=settings.worker_id,
                deadline_s=settings.deadline_s,
                counters=counters,
            )
            consumers = await declare_consumers(parts.bus, "generate", settings.model_name)
            puller = JobPuller(
                parts.bus,
                "generate",
                consumers=consumers,
                slots=settings.pd_slots,
                worker=settings.worker_id,
            )
            await stack.enter_async_context(puller)
            await parts.worker.work(puller, handler.handle, stop)
