"""Looking at the services of a deployment, and stopping them in their tracks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import psutil
from deployment import Deployment

from epd_common.bus import Bus
from epd_common.health import ask_health


async def counters(deployment: Deployment, worker: str) -> dict[str, int]:
    async with Bus(deployment.stack.nats_url, name="test") as bus:
        health: Any = await ask_health(bus, worker)
    return dict(health["counters"])


@contextlib.asynccontextmanager
async def frozen_encoder(deployment: Deployment) -> AsyncIterator[None]:
    """An encoder that neither works nor dies."""
    encoder = next(s for s in deployment.stack.services if s.role == "encoder")
    processes = [psutil.Process(encoder.pid)]
    processes += processes[0].children(recursive=True)
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()
