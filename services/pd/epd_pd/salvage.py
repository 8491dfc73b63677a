"""Answering a job that does not decode, as far as it tells where the answer should go."""

from __future__ import annotations

import contextlib
import math

import msgspec

from epd_common.bus import Bus
from epd_common.protocol import GenerateJob, ProtocolError
from epd_common.protocol.codec import UNREADABLE
from epd_common.protocol.subjects import (
    DECODE_PLACE,
    MAX_INBOX,
    is_inbox,
    is_request_id,
    place_of,
)
from epd_pd.frames import FrameWriter


class _Address(msgspec.Struct):
    inbox: str
    request_id: str = ""


def check_job(job: GenerateJob, model: str, *, subject: str) -> None:
    """What the message's types do not say.

    Args:
        subject: To which it was published; to that of decode jobs only workers may.

    Raises:
        ProtocolError: naming the field.
    """
    if job.handover is not None and place_of(subject) != DECODE_PLACE:
        raise ProtocolError("'handover' is for prefill workers to set")
    if not is_request_id(job.request_id):
        raise ProtocolError("'request_id' must be 1 to 128 letters, digits, '_' or '-'")
    if not math.isfinite(job.deadline):
        raise ProtocolError("'deadline' must be a finite number")
    if job.inbox and not is_inbox(job.inbox):
        raise ProtocolError(
            "'inbox' must be a subject of its own, without wildcards, "
            f"of at most {MAX_INBOX} characters"
        )
    if job.model != model:
        raise ProtocolError(f"'model' is {job.model[:80]!r}, but this queue is that of {model!r}")


def _address(data: bytes) -> _Address | None:
    with contextlib.suppress(*UNREADABLE):
        return msgspec.msgpack.decode(data, type=_Address)
    with contextlib.suppress(*UNREADABLE):
        # A key that is no text, as a turned bit makes one, makes a map no message; its inbox is there.
        return msgspec.convert(_texts(msgspec.msgpack.decode(data)), _Address)
    return None


def _texts(found: object) -> dict[str, object]:
    items = found.items() if isinstance(found, dict) else ()
    return {key: value for key, value in items if isinstance(key, str)}


def writer_for_undone(bus: Bus, data: bytes, *, attempt: int, worker: str) -> FrameWriter | None:
    """A writer to the inbox that a job names, however malformed the rest is; None if it names none."""
    address = _address(data)
    if address is None or not is_inbox(address.inbox):
        return None
    return FrameWriter(
        bus,
        inbox=address.inbox,
        request_id=address.request_id,
        attempt=attempt,
        worker=worker,
    )
