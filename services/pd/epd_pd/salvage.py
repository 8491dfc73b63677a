"""Answering a job that does not decode, as far as it tells where the answer should go."""

from __future__ import annotations

import re

import msgspec

from epd_common.bus import Bus, Delivery
from epd_pd.frames import FrameWriter

_SUBJECT = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")


class _Address(msgspec.Struct):
    inbox: str
    request_id: str = ""


def is_inbox(subject: str) -> bool:
    """Whether one can publish to it."""
    return _SUBJECT.fullmatch(subject) is not None


def writer_for_malformed(bus: Bus, delivery: Delivery, worker: str) -> FrameWriter | None:
    """A writer to the inbox that the malformed job names; None if it names none."""
    try:
        address = msgspec.msgpack.decode(delivery.data, type=_Address)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not is_inbox(address.inbox):
        return None
    return FrameWriter(
        bus,
        inbox=address.inbox,
        request_id=address.request_id,
        attempt=delivery.attempt,
        worker=worker,
    )
