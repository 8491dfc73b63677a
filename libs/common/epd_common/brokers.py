"""A service's connections to NATS and Valkey. One that starts before them waits: for a bounded time, and it
says so.

Whoever starts everything at once (a machine that boots, a rollout) has no order; but a service that waits
for ever would never say that its URL is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Literal, TypeVar

from redis.asyncio import Redis

from epd_common.bus import Bus
from epd_common.bus.connection import CONNECT_TIMEOUT_S
from epd_common.errors import LoginRefusedError, UnavailableError
from epd_common.lifecycle import wait_any
from epd_common.protocol import subjects
from epd_common.settings import CommonSettings
from epd_common.store import open_redis

logger = logging.getLogger(__name__)

PAUSE_S = 0.5
SAY_AFTER_S, SAY_AGAIN_S = 2.0, 10.0
LEAST_TRY_S = 2.0

T = TypeVar("T")


async def open_brokers(
    stack: AsyncExitStack,
    settings: CommonSettings,
    *,
    role: Literal["gateway", "encoder", "pd"],
    stop: asyncio.Event,
) -> tuple[Bus, Redis]:
    """NATS and Valkey as the settings say, open as long as the stack is.

    Raises:
        UnavailableError: one of them did not answer within ``EPD_BROKER_WAIT_S``, or refuses the login.
    """

    wait_s = settings.broker_wait_s

    def bus() -> Bus:
        return Bus(
            settings.nats_url,
            name=f"epd-{role} {settings.worker_id}",
            login=settings.nats_login(),
            inbox=subjects.inbox_prefix(role),
            connect_within_s=min(CONNECT_TIMEOUT_S, max(LEAST_TRY_S, wait_s)),
        )

    def redis() -> AbstractAsyncContextManager[Redis]:
        return open_redis(
            settings.redis_url, ca=settings.redis_ca, password_file=settings.redis_password_file
        )

    return (
        await once_there(stack, "NATS", bus, wait_s=wait_s, stop=stop),
        await once_there(stack, "Valkey", redis, wait_s=wait_s, stop=stop),
    )


async def once_there(
    stack: AsyncExitStack,
    what: str,
    opening: Callable[[], AbstractAsyncContextManager[T]],
    *,
    wait_s: float,
    stop: asyncio.Event,
) -> T:
    """Enter a connection as soon as its broker answers; it is closed with the stack.

    Args:
        what: The broker, for the log.
        opening: Makes the connection anew for each try.
        wait_s: How long to try again.
        stop: Ends the wait, as when SIGTERM comes.

    Raises:
        LoginRefusedError: at once, as that does not change by itself.
        UnavailableError: the broker did not come.
    """
    give_up = time.monotonic() + wait_s
    with _saying(what, give_up):
        while True:
            try:
                return await stack.enter_async_context(opening())
            except LoginRefusedError:
                raise
            except UnavailableError as error:
                left_s = give_up - time.monotonic()
                if left_s <= 0 or stop.is_set():
                    waited = f" (waited {wait_s:g} s for it, EPD_BROKER_WAIT_S)" if wait_s else ""
                    raise UnavailableError(f"{error.message}{waited}", code=error.code) from error
            await wait_any(stop, timeout_s=min(PAUSE_S, left_s))


@contextlib.contextmanager
def _saying(what: str, give_up: float) -> Iterator[None]:
    """Log again and again that somebody waits, while that goes on: a try alone can take seconds."""
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []

    def say() -> None:
        left_s = max(0.0, give_up - time.monotonic())
        logger.warning("waiting for %s, which does not answer; %.0f s more at most", what, left_s)
        timers[:] = [loop.call_later(SAY_AGAIN_S, say)]

    timers.append(loop.call_later(SAY_AFTER_S, say))
    try:
        yield
    finally:
        timers[0].cancel()
