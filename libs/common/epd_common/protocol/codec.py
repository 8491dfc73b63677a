"""MessagePack in and out, with errors that say which field is wrong."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from epd_common.errors import BadRequestError
from epd_common.protocol.base import VERSION, Message
from epd_common.protocol.control import (
    Cancel,
    Cancelled,
    DeadLetter,
    Progress,
    ReplayRequest,
    ResumeRequest,
)
from epd_common.protocol.events import EmbeddingEvent
from epd_common.protocol.holdings import Held
from epd_common.protocol.jobs import EncodeJob, GenerateJob
from epd_common.protocol.replies import ReplyData, ReplyEnd, ReplyError, ReplyFrame, ReplyHead
from epd_common.protocol.workers import WorkerRecord

M = TypeVar("M", bound=Message)

MESSAGES: tuple[type[Message], ...] = (
    EncodeJob,
    GenerateJob,
    EmbeddingEvent,
    ReplyHead,
    ReplyData,
    ReplyEnd,
    ReplyError,
    Cancel,
    Cancelled,
    ReplayRequest,
    ResumeRequest,
    Progress,
    Held,
    DeadLetter,
    WorkerRecord,
)
"""Every message of the protocol. Nothing outside this list is ever decoded."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that anybody may send; the last for arrays nested too deep."""

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[tuple[type[Message], ...], msgspec.msgpack.Decoder[Message]] = {}
_OF_REPLIES = (ReplyHead, ReplyData, ReplyEnd, ReplyError, ResumeRequest)
_reply_decoder: msgspec.msgpack.Decoder[ReplyFrame | ResumeRequest] = msgspec.msgpack.Decoder(
    ReplyFrame | ResumeRequest
)
"""Apart, as there is one frame for each token."""


class ProtocolError(BadRequestError):
    """A message that is not what it should be; the text names the field."""

    default_code = "malformed_message"


class _Envelope(msgspec.Struct):
    t: str = ""
    v: int = VERSION


def encode(message: Message) -> bytes:
    """The message as MessagePack."""
    return _encoder.encode(message)


def decode(data: bytes, *types: type[M]) -> M:
    """Decode a message that must be one of ``types``.

    Raises:
        ProtocolError: not MessagePack, another message, an unknown version, or a wrong field.
    """
    decoder = _decoders.get(types)
    if decoder is None:
        union = types[0]
        for other in types[1:]:
            union = union | other  # type: ignore[assignment]
        decoder = _decoders.setdefault(types, msgspec.msgpack.Decoder(union))
    try:
        message = decoder.decode(data)
    except UNREADABLE as error:
        raise ProtocolError(_explain(data, types, error)) from error
    if message.v != VERSION:
        raise ProtocolError(_wrong_version(message.v))
    return message  # type: ignore[return-value]


def decode_reply(data: bytes) -> ReplyFrame | ResumeRequest:
    """Decode what comes to a requester's inbox: a frame of a reply, or a question about it. A receipt that
    cannot be read is left out, as it is not worth an answer."""
    try:
        try:
            found = _reply_decoder.decode(data)
        except msgspec.ValidationError:
            found = _reply_decoder.decode(_without_receipt(data))
    except UNREADABLE as error:
        raise ProtocolError(_explain(data, _OF_REPLIES, error)) from error
    if found.v != VERSION:
        raise ProtocolError(_wrong_version(found.v))
    return found


def _without_receipt(data: bytes) -> bytes:
    frame = msgspec.msgpack.decode(data)
    if isinstance(frame, dict):
        frame.pop("receipt", None)
    return msgspec.msgpack.encode(frame)


def _explain(data: bytes, types: tuple[type[M], ...], error: Exception) -> str:
    expected = " or ".join(repr(t.__struct_config__.tag) for t in types)
    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
    except UNREADABLE:
        return f"expected a MessagePack map with 't' and 'v' (message {expected}): {error}"
    if envelope.v != VERSION:
        return _wrong_version(envelope.v)
    if envelope.t not in {t.__struct_config__.tag for t in types}:
        return f"expected message {expected}, got 't' = {envelope.t!r}"
    return f"message {envelope.t!r}: {error}"


def _wrong_version(version: int) -> str:
    return f"schema version 'v' = {version} is not supported here; this side speaks {VERSION}"
