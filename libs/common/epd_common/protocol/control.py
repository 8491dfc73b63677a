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


class ResumeRequest(Message, tag="resume", frozen=True, kw_only=True):
    """How much of the answer is there? To the requester's inbox, from the worker that begins ``attempt``.

    Frames of older attempts count no more from now on.
    """

    request_id: str
    attempt: int


class Progress(Message, tag="progress", frozen=True, kw_only=True):
    """What a requester has of an answer. Subject ``epd.v1.progress.<request>``.

    ``attempt`` is that of the question. The requester has the frames before number ``seq``; 0 means that the
    answer may begin anew, else it is a stream whose frame ``seq`` comes next. ``tokens`` are those of its
    data frames, one list a frame, ``finish`` the last frame's, and ``last`` are the last one's bytes.
    """

    request_id: str
    attempt: int
    seq: int = 0
    tokens: list[list[int]] = []
    finish: str = ""
    last: bytes = b""


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
