"""Looking at the services of a deployment, and stopping them in their tracks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import psutil
from deployment import Deployment

from epd_common.bus import Bus
from epd_common.health import ask_health


async def health(deployment: Deployment, worker: str) -> dict[str, Any]:
    async with Bus(deployment.stack.nats_url, name="test") as bus:
        return dict(await ask_health(bus, worker))


async def counters(deployment: Deployment, worker: str) -> dict[str, int]:
    return dict((await health(deployment, worker))["counters"])


def frozen_encoder(deployment: Deployment) -> contextlib.AbstractAsyncContextManager[None]:
    """An encoder that neither works nor dies."""
    return frozen(deployment, "encoder")


@contextlib.asynccontextmanager
async def frozen(deployment: Deployment, role: str) -> AsyncIterator[None]:
    """A service that neither works nor dies."""
    service = next(s for s in deployment.stack.services if s.role == role)
    processes = [psutil.Process(service.pid)]
    processes += processes[0].children(recursive=True)
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()
