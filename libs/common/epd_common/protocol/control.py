"""Control messages, and what the dead-letter stream holds."""

from __future__ import annotations

from epd_common.protocol.base import Message


class Cancel(Message, tag="cancel", frozen=True, kw_only=True):
    """Stop working on a request. Subject ``epd.v1.cancel.<request>``."""

    request_id: str
    reason: str = ""


class Cancelled(Message, tag="cancelled", frozen=True, kw_only=True):
    """Answers a cancel that names a reply subject: who had the request and lets go of it."""

    request_id: str
    role: str
    worker: str


class ReplayRequest(Message, tag="replay", frozen=True, kw_only=True):
    """Send the frames from ``seq`` on again. Subject ``epd.v1.replay.<request>``."""

    request_id: str
    attempt: int
    seq: int


class DeadLetter(Message, tag="dead", frozen=True, kw_only=True):
    """A job that was given up. Subject ``epd.v1.dlq.<stage>``, stream ``EPD_DLQ``.

    ``payload`` is the message as it came, which need not be decodable.
    """

    stage: str
    subject: str
    reason: str
    code: str
    worker: str
    attempts: int
    at: float
    payload: bytes
