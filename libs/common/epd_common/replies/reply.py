"""One reply: frames that come in any order, more than once, or not at all, as the bytes of an answer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from epd_common.errors import (
    DeadlineError,
    EpdError,
    RequestCancelledError,
    UpstreamError,
    from_status,
)
from epd_common.protocol import (
    Progress,
    Receipt,
    ReplayRequest,
    ReplyData,
    ReplyEnd,
    ReplyError,
    ReplyHead,
    ResumeRequest,
    subjects,
)
from epd_common.protocol.replies import ReplyFrame

if TYPE_CHECKING:
    from epd_common.replies.hub import ReplyHub

BUFFER_BYTES = 16 << 20
"""Bytes of a stream that may wait for a slow reader; above it the request is given up."""

WHOLE_BYTES = 64 << 20
"""Bytes of an answer that is no stream, and is handed over when it is whole."""

EVENT_STREAM = "text/event-stream"

LOOK_S = 0.25
"""Seconds between looks for frames that are missing."""

SILENCE_S = 5.0
"""A reply from which nothing came for so long may have lost its last frames."""

MOST_TYPE_CHARACTERS = 128
"""Of a content type."""

MOST_RETRY_S = 86_400.0

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
        self._late = False
        self._timer: asyncio.TimerHandle | None = None
        self.finished = False
        self.submitted = False
        self.receipt: Receipt | None = None
        """The worker's, once the reply has ended."""

    @property
    def inbox(self) -> str:
        return self._hub.inbox(self.request_id)

    async def __aenter__(self) -> Self:
        self._hub.register(self)
        left_s = self._deadline - time.monotonic()
        # One for the whole answer: waiting for a frame happens for each token.
        self._timer = asyncio.get_running_loop().call_later(left_s, self._be_late)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hub.forget(self)
        if self._timer is not None:
            self._timer.cancel()
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
        if not _is_head(frame):
            raise UpstreamError("the head of the answer is none", stage="generate")
        return frame

    async def data(self) -> AsyncIterator[bytes]:
        """The pieces of the answer's body after :meth:`head`, until its end. Those that wait come as one, so
        that a reader who is behind has less to do for each.

        Raises:
            EpdError: the request failed on the way, or its deadline passed.
        """
        while True:
            match await self._next():
                case ReplyData(data=data):
                    await asyncio.sleep(
                        0
                    )  # in a busy process more has come by then, and is sent with it
                    yield b"".join((data, *self._waiting()))
                case ReplyEnd():
                    return
                case other:
                    raise UpstreamError(
                        f"unexpected {type(other).__name__} within an answer", stage="generate"
                    )

    def _waiting(self) -> Iterator[bytes]:
        """Take the pieces that are here already."""
        frames = self._frames
        while frames and type(frame := frames[0]) is ReplyData:
            frames.popleft()
            self._buffered -= len(frame.data)
            yield frame.data

    @property
    def buffered_bytes(self) -> int:
        return self._buffered

    @property
    def given_up(self) -> bool:
        """Whether no further frame is of use."""
        return self._failure is not None

    def offer(self, frame: ReplyFrame) -> None:
        """Take a frame from the bus; late, doubled and foreign ones are dropped."""
        if self.finished or self._failure is not None or frame.attempt < self._attempt:
            return
        if frame.seq == self._expected and frame.attempt == self._attempt and not self._early:
            # The frame that comes next, as nearly all do: there is one for each token.
            self._expected += 1
            self._asked, self._ask_at = 0, time.monotonic() + SILENCE_S
            if type(frame) is ReplyData:
                self._buffered += len(frame.data)
            self._take(frame)
        elif not self._sort_in(frame):
            return
        self._check_room()
        self._arrived.set()

    def _sort_in(self, frame: ReplyFrame) -> bool:
        """Take a frame that begins another attempt, or that others are missing before.

        False where it is of no use.
        """
        resumed = self._progress
        if resumed and frame.attempt == resumed.attempt and frame.seq < resumed.seq:
            # It has begun anew, as it did not hear in time what is here: no part of that fits.
            self._fail(_failure_of(frame) if isinstance(frame, ReplyError) else _worker_lost())
            return False
        if frame.attempt > self._attempt:
            if self._started:
                self._fail(_worker_lost())
                return False
            self._begin_anew(frame.attempt)
        if frame.seq < self._expected or frame.seq in self._early:
            return False
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
        return True

    def _take(self, frame: ReplyFrame) -> None:
        self._frames.append(frame)
        if isinstance(frame, ReplyData):
            if self._streams:
                self._told.append(frame.tokens)
                self._finish = frame.finish or self._finish
                self._last = frame.data
        elif isinstance(frame, ReplyHead):
            self._streams = frame.content_type.startswith(EVENT_STREAM)
        else:
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

    def _be_late(self) -> None:
        self._late = True
        self._arrived.set()

    def _fail(self, error: EpdError) -> None:
        self._failure = error
        self._arrived.set()

    async def _next(self) -> ReplyFrame:
        # What is no stream is handed over whole: until then another worker may begin it anew.
        while not (self._frames and (self._streams or self._whole)):
            if self._failure is not None:
                raise self._failure
            if self._late:
                raise DeadlineError(
                    "the request's deadline passed while it waited for "
                    + ("more of the answer" if self._started else "a PD worker's answer"),
                    stage="generate",
                )
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._frames.popleft()
        self._started = True
        if isinstance(frame, ReplyData):
            self._buffered -= len(frame.data)
        if isinstance(frame, ReplyEnd | ReplyError):
            self.finished = True
            self.receipt = frame.receipt
        if isinstance(frame, ReplyError):
            raise _failure_of(frame)
        return frame


def _is_head(frame: ReplyHead) -> bool:
    """Whether an HTTP answer can begin with it; a worker in any language may have written it."""
    return (
        200 <= frame.status <= 599
        and len(frame.content_type) <= MOST_TYPE_CHARACTERS
        and frame.content_type.isascii()
        and frame.content_type.isprintable()
        and (not frame.worker or subjects.is_worker(frame.worker))
    )


def _failure_of(frame: ReplyError) -> EpdError:
    return from_status(
        frame.status,
        frame.message,
        code=frame.code or None,
        stage=frame.stage or None,
        key=frame.key or None,
        param=frame.param or None,
        retry_after_s=frame.retry_after_s if 0 < frame.retry_after_s <= MOST_RETRY_S else None,
    )


def _worker_lost() -> UpstreamError:
    return UpstreamError(
        "the worker of this request was lost after its answer had begun; it cannot be resumed on another: "
        "send it again",
        code="worker_lost",
        stage="generate",
    )
