"""Frames that were sent, kept for a while: what a requester missed is sent again when it asks.

Core NATS delivers at most once: frames are lost while a broker restarts, or where a reader is too slow.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict, deque
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from nats.aio.msg import Msg

from epd_common.bus import Bus
from epd_common.errors import EpdError
from epd_common.protocol import ProtocolError, ReplayRequest, decode, subjects

logger = logging.getLogger(__name__)

KEPT_S = 60.0
"""How long the frames of an answer are kept after the last one."""

REPLY_BYTES = 2 << 20
"""Of one answer the latest frames are kept, up to this."""

TOTAL_BYTES = 64 << 20
"""Of all answers, those that were written to last."""


class SentFrames:
    """The latest frames of one attempt at one request, which begins with the frame number ``first``."""

    def __init__(self, inbox: str, attempt: int, first: int = 0) -> None:
        self.inbox = inbox
        self.attempt = attempt
        self.first = first
        self.bytes = 0
        self.touched = time.monotonic()
        self._frames: deque[bytes] = deque()
        self._oldest = first
        """Number of the oldest frame that is kept."""

    def add(self, frame: bytes) -> None:
        self._frames.append(frame)
        self.bytes += len(frame)
        self.touched = time.monotonic()
        while self.bytes > REPLY_BYTES and len(self._frames) > 1:
            self.bytes -= len(self._frames.popleft())
            self._oldest += 1

    def since(self, seq: int) -> list[bytes]:
        """The frames from ``seq`` on; none if that one is no longer kept."""
        if seq < self._oldest:
            return []
        return list(self._frames)[seq - self._oldest :]


class Replays:
    """Keeps frames and sends them again. Use as an async context manager."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._sent: OrderedDict[str, SentFrames] = OrderedDict()
        self._bytes = 0
        self._stack = AsyncExitStack()
        self.asked = 0

    async def __aenter__(self) -> Self:
        subject = subjects.replay_subject("*")
        await self._stack.enter_async_context(self._bus.listening(subject, self._on_request))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def report(self) -> dict[str, int]:
        """Answers of which frames are kept, their bytes, and those bytes as counted one by one."""
        return {
            "answers": len(self._sent),
            "bytes": self._bytes,
            "counted_bytes": sum(sent.bytes for sent in self._sent.values()),
            "limit_bytes": TOTAL_BYTES,
        }

    def begin(self, request_id: str, inbox: str, attempt: int, *, first: int = 0) -> None:
        """A new attempt, whose first frame has this number: those of an older one are of no use any more."""
        self._drop(request_id)
        self._drop_old()
        self._sent[request_id] = SentFrames(inbox, attempt, first)

    def note(self, request_id: str, frame: bytes) -> None:
        """A frame is about to be sent."""
        sent = self._sent.get(request_id)
        if sent is None:
            return  # dropped for want of room
        self._bytes -= sent.bytes
        sent.add(frame)
        self._bytes += sent.bytes
        self._sent.move_to_end(request_id)
        while self._bytes > TOTAL_BYTES:
            self._drop(next(iter(self._sent)))

    def forget(self, request_id: str) -> None:
        """Nobody will ask for these any more."""
        self._drop(request_id)

    def _drop_old(self) -> None:
        oldest = time.monotonic() - KEPT_S
        while self._sent:
            request_id, sent = next(iter(self._sent.items()))
            if sent.touched >= oldest:
                return
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            self._bytes -= sent.bytes

    async def _on_request(self, message: Msg) -> None:
        try:
            asked = decode(message.data, ReplayRequest)
        except ProtocolError as error:
            logger.warning("dropping a replay request: %s", error)
            return
        sent = self._sent.get(asked.request_id)
        if sent is None or asked.attempt > sent.attempt:
            return
        # Who asks for an older attempt has seen nothing of this one.
        frames = sent.since(asked.seq if asked.attempt == sent.attempt else sent.first)
        if not frames:
            return
        self.asked += 1
        logger.info("sending %d frames again", len(frames), extra={"request_id": asked.request_id})
        with contextlib.suppress(EpdError):  # it will ask once more
            for frame in frames:
                await self._bus.emit_bytes(sent.inbox, frame)
