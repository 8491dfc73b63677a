"""Receiving replies: one inbox subscription for all requests of a process, a bounded buffer for each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from nats.aio.msg import Msg

from epd_common.bus.connection import Bus
from epd_common.errors import (
    DeadlineError,
    EpdError,
    RequestCancelledError,
    UpstreamError,
    from_status,
)
from epd_common.protocol import (
    Cancel,
    Cancelled,
    Progress,
    ProtocolError,
    ReplayRequest,
    ReplyData,
    ReplyEnd,
    ReplyError,
    ReplyHead,
    ResumeRequest,
    decode_reply,
    encode,
    subjects,
)
from epd_common.protocol.replies import ReplyFrame
from epd_common.tasks import end

logger = logging.getLogger(__name__)

BUFFER_BYTES = 16 << 20
"""Bytes of a stream that may wait for a slow reader; above it the request is given up."""

WHOLE_BYTES = 64 << 20
"""Bytes of an answer that is no stream, and is handed over when it is whole."""

EVENT_STREAM = "text/event-stream"

LOOK_S = 0.25
"""Seconds between looks for frames that are missing."""

SILENCE_S = 5.0
"""A reply from which nothing came for so long may have lost its last frames."""

ASKED_TIMES = 8
"""A gap is asked for so often before the request is given up; the time between grows to ``SILENCE_S``."""


class Reply:
    """The frames of one request, in order.

    Use as an async context manager: leaving it before the end cancels the request upstream.
    """

    def __init__(self, hub: ReplyHub, request_id: str, deadline: float) -> None:
        self._hub = hub
        self.request_id = request_id
        self._deadline = deadline
        self._frames: deque[ReplyFrame] = deque()
        self._buffered = 0
        self._arrived = asyncio.Event()
        self._attempt = 0
        self._expected = 0
        self._early: dict[int, ReplyFrame] = {}
        """Frames that came before one that is missing, by number."""
        self._asked = 0
        self._ask_at = time.monotonic() + SILENCE_S
        self._started = False
        self._streams = False
        self._whole = False
        self._told: list[list[int]] = []
        self._finish = ""
        self._last = b""
        self._progress: Progress | None = None
        self._failure: EpdError | None = None
        self.finished = False
        self.submitted = False

    @property
    def inbox(self) -> str:
        return self._hub.inbox(self.request_id)

    async def __aenter__(self) -> Self:
        self._hub.register(self)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hub.forget(self)
        if self.submitted and not self.finished:
            await self._hub.cancel(self.request_id, "the requester went away")

    async def head(self) -> ReplyHead:
        """The first frame.

        Raises:
            EpdError: the request failed, or its deadline passed.
        """
        frame = await self._next()
        if not isinstance(frame, ReplyHead):
            raise UpstreamError("the answer did not begin with its head", stage="generate")
        return frame

    async def data(self) -> AsyncIterator[bytes]:
        """The pieces of the answer's body after :meth:`head`, until its end.

        Raises:
            EpdError: the request failed on the way, or its deadline passed.
        """
        while True:
            match await self._next():
                case ReplyData(data=data):
                    yield data
                case ReplyEnd():
                    return
                case other:
                    raise UpstreamError(
                        f"unexpected {type(other).__name__} within an answer", stage="generate"
                    )

    @property
    def buffered_bytes(self) -> int:
        return self._buffered

    @property
    def given_up(self) -> bool:
        """Whether no further frame is of use."""
        return self._failure is not None

    def offer(self, frame: ReplyFrame) -> None:
        """Take a frame from the bus; late, doubled and foreign ones are dropped."""
        if self.finished or self.given_up or frame.attempt < self._attempt:
            return
        resumed = self._progress
        if resumed and frame.attempt == resumed.attempt and frame.seq < resumed.seq:
            # It has begun anew, as it did not hear in time what is here: no part of that fits.
            self._fail(_failure_of(frame) if isinstance(frame, ReplyError) else _worker_lost())
            return
        if frame.attempt > self._attempt:
            if self._started:
                self._fail(_worker_lost())
                return
            self._begin_anew(frame.attempt)
        if frame.seq < self._expected or frame.seq in self._early:
            return
        if not self._early:
            self._asked, self._ask_at = 0, time.monotonic() + SILENCE_S
        if frame.seq > self._expected and not self._early:
            self._ask_at = time.monotonic()
        self._early[frame.seq] = frame
        if isinstance(frame, ReplyData):
            self._buffered += len(frame.data)
        while (following := self._early.pop(self._expected, None)) is not None:
            self._expected += 1
            self._take(following)
        self._check_room()
        self._arrived.set()

    def _take(self, frame: ReplyFrame) -> None:
        self._frames.append(frame)
        match frame:
            case ReplyHead():
                self._streams = frame.content_type.startswith(EVENT_STREAM)
            case ReplyData():
                if self._streams:
                    self._told.append(frame.tokens)
                    self._finish = frame.finish or self._finish
                    self._last = frame.data
            case _:
                self._whole = True

    def _check_room(self) -> None:
        if self._streams and self._buffered > BUFFER_BYTES:
            self._fail(
                UpstreamError(
                    f"over {BUFFER_BYTES} bytes of the answer waited for a slow reader",
                    code="reader_too_slow",
                    stage="reply",
                )
            )
        elif self._buffered > WHOLE_BYTES:
            self._fail(
                UpstreamError(
                    f"the answer is over {WHOLE_BYTES} bytes long; ask for it as a stream",
                    code="answer_too_long",
                    stage="reply",
                )
            )

    def _begin_anew(self, attempt: int) -> None:
        """Another worker begins the answer, of which nobody has seen anything yet."""
        self._forget_early()
        self._frames.clear()
        self._told.clear()
        self._streams = self._whole = False
        self._finish, self._last = "", b""
        self._buffered = 0
        self._attempt = attempt
        self._expected = 0

    def _forget_early(self) -> None:
        for frame in self._early.values():
            if isinstance(frame, ReplyData):
                self._buffered -= len(frame.data)
        self._early.clear()

    def resume(self, request: ResumeRequest) -> Progress | None:
        """What a worker that takes the request over must know; None if an older attempt asks.

        From now on the frames of older attempts are dropped. A stream goes on behind what came in order,
        which the client sees or has seen; any other answer begins anew.
        """
        if self._progress is not None and self._progress.attempt == request.attempt:
            return self._progress  # it asks again
        if self.finished or self.given_up or request.attempt <= self._attempt:
            return None
        if self._streams and self._expected > 0:
            self._forget_early()
            self._attempt = request.attempt
        else:
            self._begin_anew(request.attempt)
        self._asked, self._ask_at = 0, time.monotonic() + SILENCE_S
        self._progress = Progress(
            request_id=self.request_id,
            attempt=request.attempt,
            seq=self._expected,
            tokens=list(self._told),
            finish=self._finish,
            last=self._last,
        )
        return self._progress

    def cancelled(self) -> None:
        """Somebody else has cancelled the request: whoever waits here is told at once."""
        self._fail(RequestCancelledError("the request was cancelled"))

    def suspect(self) -> None:
        """Frames may have been lost: the connection was another one meanwhile."""
        self._ask_at = time.monotonic()

    def missing(self) -> ReplayRequest | None:
        """What to ask the PD worker for now, if anything."""
        if not self.submitted or self.finished or self.given_up or time.monotonic() < self._ask_at:
            return None
        if self._early and self._asked >= ASKED_TIMES:
            self._fail(
                UpstreamError(
                    f"frames {self._expected} to {min(self._early) - 1} of the answer were lost on the bus",
                    code="reply_gap",
                    stage="generate",
                )
            )
            return None
        pause_s = min(SILENCE_S, LOOK_S * 2**self._asked) if self._early else SILENCE_S
        self._asked += 1
        self._ask_at = time.monotonic() + pause_s
        return ReplayRequest(request_id=self.request_id, attempt=self._attempt, seq=self._expected)

    def _fail(self, error: EpdError) -> None:
        self._failure = error
        self._arrived.set()

    async def _next(self) -> ReplyFrame:
        # What is no stream is handed over whole: until then another worker may begin it anew.
        while not (self._frames and (self._streams or self._whole)):
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            try:
                async with asyncio.timeout(self._deadline - time.monotonic()):
                    await self._arrived.wait()
            except TimeoutError:
                raise DeadlineError(
                    "the request's deadline passed while it waited for "
                    + ("more of the answer" if self._started else "a PD worker's answer"),
                    stage="generate",
                ) from None
        frame = self._frames.popleft()
        self._started = True
        if isinstance(frame, ReplyData):
            self._buffered -= len(frame.data)
        if isinstance(frame, ReplyEnd | ReplyError):
            self.finished = True
        if isinstance(frame, ReplyError):
            raise _failure_of(frame)
        return frame


def _failure_of(frame: ReplyError) -> EpdError:
    return from_status(
        frame.status,
        frame.message,
        code=frame.code or None,
        stage=frame.stage or None,
        key=frame.key or None,
        param=frame.param or None,
        retry_after_s=frame.retry_after_s or None,
    )


def _worker_lost() -> UpstreamError:
    return UpstreamError(
        "the worker of this request was lost after its answer had begun; it cannot be resumed on another: "
        "send it again",
        code="worker_lost",
        stage="generate",
    )


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

    async def __aenter__(self) -> Self:
        for subject, handler in (
            (f"{self._prefix}.*", self._on_message),
            (subjects.cancel_subject("*"), self._on_cancel),
        ):
            await self._stack.enter_async_context(self._bus.listening(subject, handler))
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

    async def _on_message(self, message: Msg) -> None:
        request_id = message.subject.rpartition(".")[2]
        try:
            found = decode_reply(message.data)
        except ProtocolError as error:
            logger.warning("dropping a frame: %s", error, extra={"request_id": request_id})
            return
        reply = self._replies.get(request_id)
        if isinstance(found, ResumeRequest):
            await self._resume(request_id, reply, found)
            return
        if reply is None or reply.given_up:
            return  # the requester has gone, or waits no longer
        reply.offer(found)
        if reply.given_up:
            await self._give_up(reply)

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
