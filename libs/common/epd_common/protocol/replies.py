"""Reply frames: from the PD worker to the requester's inbox.

A reply is ``head``, any number of ``data``, then ``end``; or ``error`` at any point, which ends it. ``seq``
counts from 0 within an ``attempt``; a frame of an older attempt is dropped, and what is missing
is asked for again (``ReplayRequest``).
"""

from __future__ import annotations

from epd_common.protocol.base import Message
from epd_common.protocol.receipts import Receipt


class Reply(Message, frozen=True, kw_only=True):
    """What all frames have."""

    request_id: str
    attempt: int
    seq: int


class ReplyHead(Reply, tag="head", frozen=True, kw_only=True):
    """HTTP status and content type of the answer that follows."""

    status: int
    content_type: str = "application/json"
    worker: str = ""


class ReplyData(Reply, tag="data", frozen=True, kw_only=True):
    """Bytes of the answer's body, as the engine's OpenAI application wrote them.

    In a stream, ``tokens`` are the ids of the tokens that the engine generated for this piece, and ``finish``
    is why it ended with them (``stop``, ``length``): what another worker needs to go on from here.
    """

    data: bytes
    tokens: list[int] = []
    finish: str = ""


class ReplyEnd(Reply, tag="end", frozen=True, kw_only=True):
    """The answer is complete. ``receipt`` says how it came about; None where nobody wrote that down."""

    receipt: Receipt | None = None


class ReplyError(Reply, tag="error", frozen=True, kw_only=True):
    """The request failed. The fields are those of ``epd_common.errors.EpdError``, and ``receipt`` as at an
    answer's end."""

    status: int
    code: str
    message: str
    stage: str = ""
    key: str = ""
    param: str = ""
    retry_after_s: float = 0.0
    receipt: Receipt | None = None


ReplyFrame = ReplyHead | ReplyData | ReplyEnd | ReplyError
