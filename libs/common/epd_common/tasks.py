"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

AGAIN_S = 0.5

T = TypeVar("T")


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and return when they are over, however they end.

    A cancel can be lost: where it falls together with what ``asyncio.wait_for`` waits for, Python 3.11
    returns the result instead, and nats-py uses that function. So who does not end is asked again. That goes
    for the caller as well: asked a second time, it still waits for its own tasks, as what they hold (pins,
    claims) is given back once they are over.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile; only once the tasks are over.
    """
    cancelled: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        try:
            await asyncio.wait(running, timeout=AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def whole(awaitable: Awaitable[T]) -> T:
    """Await something to its end, also where the task that waits is cancelled meanwhile, even repeatedly.

    What is half done on a broker is known to nobody, so it could not be undone. It must be bounded.

    Raises:
        asyncio.CancelledError: the task was cancelled; only once the awaitable is over.
    """
    running = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait((running,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not running.cancelled():
            running.exception()  # seen; the cancel goes before
        raise cancelled
    return running.result()
