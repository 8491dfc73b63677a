"""All replies of a process: one inbox subscription for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from nats.aio.msg import Msg

from epd_common.bus.connection import Bus
from epd_common.errors import EpdError
from epd_common.protocol import (
    Cancel,
    Cancelled,
    ProtocolError,
    ResumeRequest,
    decode_reply,
    encode,
    subjects,
)
from epd_common.replies.reply import LOOK_S, Reply
from epd_common.tasks import end

logger = logging.getLogger(__name__)


class ReplyHub:
    """Hands frames to the replies of this process. Use as an async context manager.

    Args:
        name: Key of the process's record in the registry, for who cancels its requests and asks.
    """

    def __init__(self, bus: Bus, *, name: str = "") -> None:
        self._bus = bus
        self._name = name
        self._prefix = bus.client.new_inbox()
        self._replies: dict[str, Reply] = {}
        self._stack = AsyncExitStack()
        self._looking: asyncio.Task[None] | None = None
        self._closed: EpdError | None = None
        self._telling: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        await enter(self._bus.hearing(f"{self._prefix}.*", self._on_message))
        await enter(self._bus.listening(subjects.cancel_subject("*"), self._on_cancel))
        await self._bus.flush()
        self._looking = asyncio.create_task(self._look(), name="look for lost frames")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._looking is not None:
            await end(self._looking)
        await self._stack.aclose()
        await end(*self._telling)

    async def _look(self) -> None:
        """Ask for frames that are missing, and whether any are, after the broker was away."""
        connection = self._bus.reconnects
        while True:
            await asyncio.sleep(LOOK_S)
            if self._bus.reconnects != connection:
                connection = self._bus.reconnects
                for reply in self._replies.values():
                    reply.suspect()
            for reply in list(self._replies.values()):
                asked = reply.missing()
                if asked is not None:
                    with contextlib.suppress(EpdError):  # the next look asks again
                        await self._bus.emit(subjects.replay_subject(reply.request_id), asked)
                elif reply.given_up and reply.submitted:
                    await self._give_up(reply)

    async def _give_up(self, reply: Reply) -> None:
        """Whoever works on it may stop."""
        self.forget(reply)
        await self.cancel(reply.request_id, "the requester lost the answer")

    def report(self) -> dict[str, int]:
        """Replies that are waited for, and what of them waits for its readers."""
        return {
            "open": len(self._replies),
            "buffered_bytes": sum(reply.buffered_bytes for reply in self._replies.values()),
        }

    async def fail_all(self, error: EpdError) -> None:
        """End every reply, and those to come, with an error, after what has come of it; who works on one is
        told to stop."""
        self._closed = error
        for reply in list(self._replies.values()):
            reply._fail(error)
            if reply.submitted:
                await self._give_up(reply)

    @property
    def open_replies(self) -> int:
        return len(self._replies)

    def inbox(self, request_id: str) -> str:
        return f"{self._prefix}.{request_id}"

    def expect(self, request_id: str, *, timeout_s: float) -> Reply:
        """A reply to enter before its request is submitted."""
        return Reply(self, request_id, time.monotonic() + timeout_s)

    def register(self, reply: Reply) -> None:
        self._replies[reply.request_id] = reply
        if self._closed is not None:
            reply._fail(self._closed)

    def forget(self, reply: Reply) -> None:
        self._replies.pop(reply.request_id, None)

    async def cancel(self, request_id: str, reason: str) -> None:
        """Tell whoever works on the request to stop."""
        message = Cancel(request_id=request_id, reason=reason)
        with contextlib.suppress(EpdError):  # then its deadline ends it
            await self._bus.emit_bytes(subjects.cancel_subject(request_id), encode(message))

    def _on_message(self, subject: str, data: bytes) -> None:
        request_id = subject.rpartition(".")[2]
        try:
            found = decode_reply(data)
        except ProtocolError as error:
            logger.warning("dropping a frame: %s", error, extra={"request_id": request_id})
            return
        reply = self._replies.get(request_id)
        if isinstance(found, ResumeRequest):
            self._tell(self._resume(request_id, reply, found))
            return
        if reply is None or reply.given_up:
            return  # the requester has gone, or waits no longer
        reply.offer(found)
        if reply.given_up:
            self._tell(self._give_up(reply))

    def _tell(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(telling, name="tell a worker")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _on_cancel(self, message: Msg) -> None:
        reply = self._replies.get(message.subject.rpartition(".")[2])
        if reply is None:
            return
        reply.cancelled()
        role, _, worker = self._name.partition(".")
        await answer_cancel(self._bus, message, reply.request_id, role=role, worker=worker)

    async def _resume(self, request_id: str, reply: Reply | None, asked: ResumeRequest) -> None:
        """Tell a worker where to go on, or that nobody waits any more."""
        if reply is None or reply.given_up:
            await self.cancel(request_id, "the requester has gone")
            return
        progress = reply.resume(asked)
        if progress is not None:
            with contextlib.suppress(EpdError):  # it asks again
                await self._bus.emit(subjects.progress_subject(request_id), progress)


async def answer_cancel(bus: Bus, message: Msg, request_id: str, *, role: str, worker: str) -> None:
    """Tell whoever cancels a request, if he asks, who had it."""
    if subjects.is_inbox(message.reply):
        with contextlib.suppress(EpdError):
            answer = Cancelled(request_id=request_id, role=role, worker=worker)
            await bus.emit(message.reply, answer)
