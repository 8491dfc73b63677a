"""Sending a reply: frames to the requester's inbox."""

from __future__ import annotations

from typing import Any

from epd_common.bus import Bus
from epd_common.errors import EpdError
from epd_common.protocol import ReplyData, ReplyEnd, ReplyError, ReplyHead, encode
from epd_pd.replays import Replays


class FrameWriter:
    """Writes the frames of one attempt at one request, in order.

    Args:
        inbox: Subject of the requester; empty if nobody wants the answer.
        replays: Keeps what was sent, for requesters that missed some of it.
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
    ) -> None:
        self._bus = bus
        self._replays = replays
        self._inbox = inbox
        self._request_id = request_id
        self._attempt = attempt
        self._worker = worker
        self._seq = 0

    @property
    def begun(self) -> bool:
        """Whether a part of the answer is out; another attempt could not take that back."""
        return self._seq > 0

    async def head(self, status: int, content_type: str) -> None:
        await self._send(
            ReplyHead(
                **self._common(), status=status, content_type=content_type, worker=self._worker
            )
        )

    async def data(self, data: bytes) -> None:
        """Bytes of the body; more than a message holds go in several."""
        limit = self._bus.max_payload_bytes - 1024
        for start in range(0, len(data), limit):
            await self._send(ReplyData(**self._common(), data=data[start : start + limit]))

    async def end(self) -> None:
        await self._send(ReplyEnd(**self._common()))
        await self._bus.flush()

    async def error(self, error: EpdError) -> None:
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
            )
        )
        await self._bus.flush()

    def _common(self) -> dict[str, Any]:
        seq, self._seq = self._seq, self._seq + 1
        return {"request_id": self._request_id, "attempt": self._attempt, "seq": seq}

    async def _send(self, frame: ReplyHead | ReplyData | ReplyEnd | ReplyError) -> None:
        if not self._inbox:
            return
        data = encode(frame)
        if self._replays is not None:
            if frame.seq == 0:
                self._replays.begin(self._request_id, self._inbox, self._attempt)
            self._replays.note(self._request_id, data)
        await self._bus.emit_bytes(self._inbox, data)
