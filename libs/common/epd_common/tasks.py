"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.5


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and return when they are over, however they end.

    A cancel can be lost: where it falls together with what ``asyncio.wait_for`` waits for, Python 3.11
    returns the result instead, and nats-py uses that function. So who does not end is asked again.
    """
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=AGAIN_S)
