"""Protocol v1: what travels between a client, the gateway, encoders and PD workers.

One module a link: ``jobs`` (client or gateway to workers), ``events`` (encoder to all), ``replies``
(PD to the requester), ``receipts`` (how an answer came about, with its end), ``control`` (cancel, replay,
resume, dead letters), ``workers`` (the registry), ``holdings`` (PD workers to who places requests). ``codec``
turns them into MessagePack and back, ``subjects`` and ``keys`` name things.
"""

from epd_common.protocol.codec import ProtocolError, decode, decode_reply, encode
from epd_common.protocol.control import (
    Cancel,
    Cancelled,
    DeadLetter,
    Progress,
    ReplayRequest,
    ResumeRequest,
)
from epd_common.protocol.events import EmbeddingEvent, EmbeddingState, Locator
from epd_common.protocol.holdings import Held
from epd_common.protocol.jobs import EncodeJob, GenerateJob, Handover, Item, Media
from epd_common.protocol.receipts import ItemReceipt, Receipt
from epd_common.protocol.replies import ReplyData, ReplyEnd, ReplyError, ReplyHead
from epd_common.protocol.workers import WorkerRecord, WorkerState

__all__ = [
    "Cancel",
    "Cancelled",
    "DeadLetter",
    "EmbeddingEvent",
    "EmbeddingState",
    "EncodeJob",
    "GenerateJob",
    "Handover",
    "Held",
    "Item",
    "ItemReceipt",
    "Locator",
    "Media",
    "Progress",
    "ProtocolError",
    "Receipt",
    "ReplayRequest",
    "ReplyData",
    "ReplyEnd",
    "ReplyError",
    "ReplyHead",
    "ResumeRequest",
    "WorkerRecord",
    "WorkerState",
    "decode",
    "decode_reply",
    "encode",
]
