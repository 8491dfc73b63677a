"""Sending a reply: frames to the requester's inbox."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from epd_common.bus import Bus
from epd_common.engines import AnswerPiece
from epd_common.errors import EpdError, UpstreamError
from epd_common.protocol import (
    Progress,
    Receipt,
    ReplyData,
    ReplyEnd,
    ReplyError,
    ReplyHead,
    encode,
)
from epd_pd.replays import Replays

_CREATED = re.compile(rb'"created":\d+')
"""When an answer was begun, as each event of a stream says. Within a string its quotes would be escaped."""


class FrameWriter:
    """Writes the frames of one attempt at one request, in order.

    Args:
        inbox: Subject of the requester; empty if nobody wants the answer.
        replays: Keeps what was sent, for requesters that missed some of it.
        receipt: Makes the receipt that goes with the last frame.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        inbox: str,
        request_id: str,
        attempt: int,
        worker: str,
        replays: Replays | None = None,
        receipt: Callable[[], Receipt | None] = lambda: None,
    ) -> None:
        self._receipt = receipt
        self._bus = bus
        self._replays = replays
        self._inbox = inbox
        self._request_id = request_id
        self._attempt = attempt
        self._worker = worker
        self.resumable = False
        """Whether another worker could go on with the answer."""
        self._seq = 0
        self._progress = Progress(request_id=request_id, attempt=attempt)
        self._created = b""

    @property
    def committed(self) -> bool:
        """Whether a part of the answer is out, by this attempt or an older one, with which nobody else could
        go on."""
        return max(self._seq, self._progress.seq) > 0 and not self.resumable

    def go_on(self, progress: Progress) -> None:
        """The requester has these frames already: they are made once more, compared, and not sent."""
        self._progress = progress
        if found := _CREATED.search(progress.last):
            self._created = found[0]

    def rewind(self) -> None:
        """The engine begins the answer anew, of which nothing was sent yet by this attempt."""
        self._seq = 0

    async def head(self, status: int, content_type: str) -> None:
        if self._progress.seq and status != 200:
            raise _other()
        await self._send(
            ReplyHead(
                **self._common(), status=status, content_type=content_type, worker=self._worker
            )
        )

    async def data(self, piece: AnswerPiece) -> None:
        """A piece of the body; more than a message holds goes in several.

        Raises:
            UpstreamError: it is not what the requester has in its place.
        """
        data = _CREATED.sub(self._created, piece.data) if self._created else piece.data
        room = self._bus.max_payload_bytes - 1024 - 5 * len(piece.tokens)
        for start in range(0, len(data), room):
            frame = ReplyData(
                **self._common(),
                data=data[start : start + room],
                tokens=[] if start else list(piece.tokens),
                finish=piece.finish,
            )
            if frame.seq == self._progress.seq - 1 and frame.data != self._progress.last:
                raise _other()
            await self._send(frame)

    async def end(self) -> None:
        if self._seq < self._progress.seq:
            raise _other()
        await self._send(ReplyEnd(**self._common(), receipt=self._receipt()))
        await self._bus.flush()

    async def error(self, error: EpdError) -> None:
        self._seq = max(self._seq, self._progress.seq)
        await self._send(
            ReplyError(
                **self._common(),
                status=error.status,
                code=error.code,
                message=error.message,
                stage=error.stage or "",
                key=error.key or "",
                param=error.param or "",
                retry_after_s=error.retry_after_s or 0.0,
                receipt=self._receipt(),
            )
        )
        await self._bus.flush()

    def _common(self) -> dict[str, Any]:
        seq, self._seq = self._seq, self._seq + 1
        return {"request_id": self._request_id, "attempt": self._attempt, "seq": seq}

    async def _send(self, frame: ReplyHead | ReplyData | ReplyEnd | ReplyError) -> None:
        if not self._inbox or frame.seq < self._progress.seq:
            return
        data = encode(frame)
        if self._replays is not None:
            if frame.seq == self._progress.seq:
                self._replays.begin(self._request_id, self._inbox, self._attempt, first=frame.seq)
            self._replays.note(self._request_id, data)
        await self._bus.emit_bytes(self._inbox, data)


def _other() -> UpstreamError:
    return UpstreamError(
        "the worker of this request was lost, and what another made of its tokens is not what was sent; "
        "send it again",
        code="worker_lost",
        stage="generate",
    )
