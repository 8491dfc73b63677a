"""The services on simulated engines, whose time a test holds and looks at."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from epd_common.engines import EncoderEngine, PdEngine
from epd_common.store import Arena
from epd_encoder.settings import EncoderSettings
from epd_pd.engines import kept_prompts
from epd_pd.settings import PdSettings
from epd_sim.encoder_engine import SimEncoderEngine
from epd_sim.pd_engine import SimPdEngine
from service_stack import ServiceStack


class Time:
    """Lets simulated time pass at once, or not while ``passing`` is clear; ``slept`` is what passed."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.real_s = 0.0
        """What each sleep takes of the test's own time."""
        self.hold_after = 0
        """After so many sleeps more ``passing`` is cleared, once."""
        self.passing = asyncio.Event()
        self.passing.set()

    async def __call__(self, seconds: float) -> None:
        if self.hold_after:
            self.hold_after -= 1
            if not self.hold_after:
                self.passing.clear()
        await self.passing.wait()
        self.slept.append(seconds)
        await asyncio.sleep(self.real_s)


class SimStack(ServiceStack):
    """Made by :func:`sim_stack`. All encoders share a time, and all PD workers another one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.encoder_time = Time()
        self.pd_time = Time()
        self.settings: dict[str, Any] = {"sim_profile": "instant"}
        """Of all workers that are added."""

    def encoder_engine(self, settings: EncoderSettings, staging: Path) -> EncoderEngine:
        return SimEncoderEngine(settings.sim_options(), staging=staging, sleep=self.encoder_time)

    def pd_engine(self, settings: PdSettings, arena: Arena) -> PdEngine:
        return SimPdEngine(
            settings.sim_options(),
            arena=arena,
            max_num_seqs=settings.max_num_seqs,
            encode="always" if settings.ec_role == "ec_both" else settings.local_encode,
            sleep=self.pd_time,
            kept_prompts=kept_prompts(settings),
        )

    def _worker_settings(self, worker: Any, role: str) -> dict[str, Any]:
        return {**super()._worker_settings(worker, role), **self.settings}

    async def start(self, *, encoders: int = 1, pds: int = 1, **gateway: Any) -> None:
        """Add so many workers with the settings of all, and a gateway, and wait until they are ready."""
        for _ in range(encoders):
            await self.add_encoder()
        for _ in range(pds):
            await self.add_pd()
        await self.add_gateway(**gateway)
        await self.ready()
        (self.fingerprint,) = {
            view.record.fingerprint for view in self.registry.workers("pd", self.model)
        }


@contextlib.asynccontextmanager
async def sim_stack(nats_url: str, redis_url: str, folder: Path) -> AsyncIterator[SimStack]:
    """Nothing but connections; the test adds services."""
    async with AsyncExitStack() as stack:
        made = SimStack(stack, nats_url, redis_url, folder)
        await made.open()
        yield made
