"""``epd cancel``: end requests, wherever they are."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from nats.aio.msg import Msg

from epd_cli.connect import operator_bus
from epd_common.bus import Bus
from epd_common.errors import BadRequestError
from epd_common.protocol import Cancel, Cancelled, ProtocolError, decode, encode, subjects

ANSWERS_WITHIN_S = 1.0
"""Whoever has a request says so within this time (invariant I11)."""


async def cancel(nats_url: str, request_ids: Sequence[str]) -> int:
    """Cancel requests and say who had each; exit code 1 if nobody had one of them.

    Raises:
        BadRequestError: this cannot be a request's id.
    """
    for request_id in request_ids:
        if not subjects.is_request_id(request_id):
            raise BadRequestError(f"{request_id[:128]!r} cannot be a request's id")
    async with operator_bus(nats_url, name="epd cancel") as bus:
        had = await ask(bus, request_ids)
    for request_id in request_ids:
        if had[request_id]:
            print(f"{request_id}: cancelled at {', '.join(sorted(had[request_id]))}")
        else:
            print(
                f"{request_id}: nobody has it; if its job is still queued, it is dropped when it comes",
                file=sys.stderr,
            )
    return 0 if all(had.values()) else 1


async def ask(bus: Bus, request_ids: Sequence[str]) -> dict[str, set[str]]:
    """Cancel requests; who had each of them, as ``<role> <worker>``."""
    had: dict[str, set[str]] = {request_id: set() for request_id in request_ids}

    async def note(message: Msg) -> None:
        try:
            answer = decode(message.data, Cancelled)
        except ProtocolError:
            return  # not a word of ours
        if answer.request_id in had:
            had[answer.request_id].add(f"{answer.role} {answer.worker}".strip())

    inbox = bus.client.new_inbox()
    await bus.subscribe(inbox, note)
    for request_id in had:
        message = Cancel(request_id=request_id, reason="epd cancel")
        await bus.emit_bytes(subjects.cancel_subject(request_id), encode(message), reply=inbox)
    await bus.flush()
    await asyncio.sleep(ANSWERS_WITHIN_S)  # a gateway and a worker may both have it
    return had
