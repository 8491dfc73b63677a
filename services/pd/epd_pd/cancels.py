"""Cancel messages: they end the request's task here, or keep it from beginning."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from epd_common.bus import Bus
from epd_common.protocol import subjects

REMEMBERED = 10_000
"""Cancels kept of requests that are not here; a job that comes for one of them is not begun."""


class Cancels:
    """Follows the cancels of all requests. Use as an async context manager."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._running: dict[str, set[asyncio.Event]] = {}
        self._early: OrderedDict[str, None] = OrderedDict()
        self._subscription: Subscription | None = None

    async def __aenter__(self) -> Self:
        self._subscription = await self._bus.subscribe(
            subjects.cancel_subject("*"), self._on_cancel
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._subscription.unsubscribe()

    @contextlib.contextmanager
    def watch(self, request_id: str) -> Iterator[asyncio.Event]:
        """An event that is set when the request is cancelled, or was before."""
        cancelled = asyncio.Event()
        if request_id in self._early:
            cancelled.set()
        # There can be two: a job is delivered again when its worker was silent for too long.
        running = self._running.setdefault(request_id, set())
        running.add(cancelled)
        try:
            yield cancelled
        finally:
            running.discard(cancelled)
            if not running:
                self._running.pop(request_id, None)

    async def _on_cancel(self, message: Msg) -> None:
        request_id = message.subject.rpartition(".")[2]
        if running := self._running.get(request_id):
            for cancelled in running:
                cancelled.set()
            return
        self._early[request_id] = None
        while len(self._early) > REMEMBERED:
            self._early.popitem(last=False)
