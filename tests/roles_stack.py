"""The services on simulated engines, with workers of their own for prefill and for decode."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from service_stack import eventually
from sim_stack import SimStack, sim_stack


@contextlib.asynccontextmanager
async def roles_stack(
    nats_url: str,
    redis_url: str,
    folder: Path,
    *,
    gateway: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[SimStack]:
    """An encoder, a prefill and a decode worker; every prompt is handed over.

    Args:
        settings: Of all workers.
    """
    async with sim_stack(nats_url, redis_url, folder) as stack:
        stack.settings |= {"split_tokens": 0, **settings}
        for role in ("prefill", "decode"):
            await stack.add_pd(pd_role=role)
        await stack.start(pds=0, **(gateway or {}))
        await eventually(lambda: len(stack.registry.decoding(stack.model)) == 1, "somebody decodes")
        yield stack
