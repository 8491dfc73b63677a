"""The NATS micro service of a worker: ``nats micro ls`` finds it, and it answers ping, info and stats."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from nats.micro import add_service
from nats.micro.request import Request
from nats.micro.service import ServiceConfig

from epd_common.bus.connection import Bus

AUDIT = b"audit"
"""A request to a health endpoint that says this is answered with the process's accounts as well."""

SERVICE_VERSION = "1.0.0"


@contextlib.asynccontextmanager
async def micro_service(
    bus: Bus,
    *,
    role: str,
    worker: str,
    health: Callable[[], dict[str, Any]],
    audit: Callable[[], dict[str, Any]],
) -> AsyncIterator[None]:
    """Offer the service ``epd-<role>`` with one endpoint, ``epd.v1.health.<worker>``.

    Args:
        health: Gives the worker's state as JSON-able fields; ``ok`` says whether it takes work.
        audit: Gives its accounts, which are added where the request says ``audit``.
    """
    service = await add_service(
        bus.client,
        ServiceConfig(
            name=f"epd-{role}",
            version=SERVICE_VERSION,
            description=f"epdflow {role}",
            metadata={"worker": worker},
        ),
    )

    async def answer(request: Request) -> None:
        more = {"audit": audit()} if request.data == AUDIT else {}
        await request.respond(json.dumps(health() | more).encode())

    await service.add_endpoint(
        name="health", handler=answer, subject=f"epd.v1.health.{worker}", queue_group=worker
    )
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # the connection may be gone already
            await service.stop()
