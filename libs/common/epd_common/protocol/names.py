"""What a job is about, for logs: read leniently, as a job that does not decode has its line as well."""

from __future__ import annotations

import msgspec

from epd_common.protocol.keys import is_key
from epd_common.protocol.subjects import is_request_id


class _Names(msgspec.Struct):
    request_id: str = ""
    key: str = ""


_decoder = msgspec.msgpack.Decoder(_Names)


def names_in(data: bytes) -> dict[str, str]:
    """``request_id`` and ``key`` of a job, those of them that it has; nothing that could not be one."""
    try:
        names = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    found = {}
    if is_request_id(names.request_id):
        found["request_id"] = names.request_id
    if is_key(names.key):
        found["key"] = names.key
    return found
