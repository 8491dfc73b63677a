"""Cancel messages: they end the request's task here, or keep it from beginning."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from nats.aio.msg import Msg
from redis.asyncio import Redis

from epd_common.bus import Bus
from epd_common.errors import EpdError, RequestCancelledError
from epd_common.protocol import subjects
from epd_common.replies import answer_cancel
from epd_common.store.redis_client import redis_errors

REMEMBERED = 10_000
"""Cancels kept of requests that are not here; a job that comes for one of them is not begun."""

WRITTEN_S = 600
"""A cancel of a request that is not here is also written down, for workers that were not there to hear it."""

CLOCKS_S = 5.0
"""By so much the clocks of brokers and workers may differ."""

_CANCELLED = "epd:v1:cancelled:"
_WRITERS = "epd-pd-cancels"


class Watched:
    """A request that runs here.

    Attributes:
        requester: Key of its sender's record in the registry, if it has one.
        attempt: Number of this attempt at it.
        cancelled: It is to end here, with this ``error``.
        taken_over: Since a later attempt has it.
    """

    def __init__(self, requester: str, attempt: int) -> None:
        self.requester = requester
        self.attempt = attempt
        self.cancelled = asyncio.Event()
        self.taken_over = False
        self.error: EpdError = RequestCancelledError("the request was cancelled")

    def cancel(self, error: EpdError | None = None) -> None:
        self.error = error or self.error
        self.cancelled.set()


class Cancels:
    """Follows the cancels of all requests. Use as an async context manager."""

    def __init__(self, bus: Bus, redis: Redis, *, worker: str) -> None:
        self._bus = bus
        self._redis = redis
        self._worker = worker
        self._running: dict[str, set[Watched]] = {}
        self._early: OrderedDict[str, None] = OrderedDict()
        self._stack = AsyncExitStack()
        self._connection = 0
        self._listening_since = 0.0

    async def __aenter__(self) -> Self:
        subject = subjects.cancel_subject("*")
        enter = self._stack.enter_async_context
        await enter(self._bus.listening(subject, self._on_cancel))
        await enter(self._bus.listening(subject, self._write_down, queue=_WRITERS))
        await self._bus.flush()  # what is cancelled from now on is heard
        self._connection = self._bus.reconnects
        self._listening_since = time.monotonic()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    @property
    def running(self) -> list[Watched]:
        """The requests that run here."""
        return [watched for each in self._running.values() for watched in each]

    async def before(self, request_id: str, queued_s: float) -> bool:
        """Whether a request was cancelled before this worker got it.

        Args:
            queued_s: So long ago its job was published. Only for one that is older than this worker's
                subscription is it looked up what was written down.
        """
        if request_id in self._early:
            return True
        if self._bus.reconnects != self._connection:
            self._connection = self._bus.reconnects
            self._listening_since = time.monotonic()
        if queued_s + CLOCKS_S < time.monotonic() - self._listening_since:
            return False
        try:
            with redis_errors():
                return bool(await self._redis.exists(_CANCELLED + request_id))
        except EpdError:
            return False  # then it is answered in vain

    @contextlib.contextmanager
    def watch(self, request_id: str, requester: str = "", attempt: int = 1) -> Iterator[Watched]:
        """A request that begins here."""
        watched = Watched(requester, attempt)
        # There can be two: a job is delivered again when its worker was silent for too long.
        running = self._running.setdefault(request_id, set())
        running.add(watched)
        try:
            yield watched
        finally:
            running.discard(watched)
            if not running:
                self._running.pop(request_id, None)

    def runs(self, request_id: str) -> bool:
        """Whether the request runs here."""
        return request_id in self._running

    def taken_over(self, request_id: str, attempt: int) -> None:
        """Another worker has begun this attempt, as this one was silent for too long: older ones end here."""
        for watched in self._running.get(request_id, ()):
            if watched.attempt < attempt:
                watched.taken_over = True
                watched.cancel()

    async def _on_cancel(self, message: Msg) -> None:
        request_id = message.subject.rpartition(".")[2]
        if running := self._running.get(request_id):
            for watched in running:
                watched.cancel()
            await answer_cancel(self._bus, message, request_id, role="pd", worker=self._worker)
            return
        self._early[request_id] = None
        while len(self._early) > REMEMBERED:
            self._early.popitem(last=False)

    async def _write_down(self, message: Msg) -> None:
        """One of all workers does that. Who runs the request needs no note."""
        request_id = message.subject.rpartition(".")[2]
        if request_id in self._running or not subjects.is_request_id(request_id):
            return
        with contextlib.suppress(EpdError), redis_errors():  # those who hear it now know it
            await self._redis.set(_CANCELLED + request_id, b"1", ex=WRITTEN_S)
