"""What is going on, as JSON: for the page at ``/ui`` and for people who ask why."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from nats.aio.msg import Msg

from epd_common.bus import Bus, Registry
from epd_common.bus.queues import queue_length
from epd_common.bus.streams import STREAMS
from epd_common.errors import NotFoundError, UnavailableError
from epd_common.protocol import WorkerRecord, subjects
from epd_common.protocol.subjects import Stage
from epd_gateway.auth import caller_of
from epd_gateway.trails import Trails

if TYPE_CHECKING:
    from epd_gateway.app import Edge

logger = logging.getLogger(__name__)

SHOWN = 50
"""Requests of one look, the latest."""

QUEUES_S = 0.5
"""Lengths of queues are asked for no more often than this, however many people look."""


class Queues:
    """The lengths of the queues as they were half a second ago at most."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._asked = -QUEUES_S
        self._known: list[dict[str, Any]] = []
        self._lock = asyncio.Lock()

    async def lengths(self) -> list[dict[str, Any]]:
        """By stage; one of which NATS says nothing is left out."""
        async with self._lock:
            if time.monotonic() - self._asked >= QUEUES_S:
                found = await asyncio.gather(*map(self._length, STREAMS))
                self._known = [length for length in found if length is not None]
                self._asked = time.monotonic()
            return self._known

    async def _length(self, stage: Stage) -> dict[str, Any] | None:
        try:
            queue = await queue_length(self._bus, stage)
        except UnavailableError as error:
            logger.warning("no length of a queue: %s", error)
            return None
        return {"stage": stage, "jobs": sum(queue.jobs.values()), "oldest_s": queue.oldest_s}


def add_live_routes(app: FastAPI, edge: Edge) -> None:
    """``/ui/api/live`` and ``/ui/api/requests/<request id>``.

    A tenant sees its own requests. Where there are several, none of them sees workers, queues and stores,
    whose load and faults are of all.
    """
    queues = Queues(edge.bus)

    @app.get("/ui/api/live")
    async def live(request: Request) -> Any:
        alive = [view.record for view in edge.registry.workers() if view.alive]
        whole = {
            "workers": [_worker(record) for record in alive if record.role != "client"],
            "queues": await queues.lengths(),
            "stores": _arenas(edge.registry),
        }
        return (whole if not edge.keys.several else {}) | {
            "time": time.time(),
            "gateway": edge.settings.worker_id,
            "requests": edge.trails.latest(SHOWN, tenant=caller_of(request).tenant),
        }

    @app.get("/ui/api/requests/{request_id}")
    async def one(request_id: str, request: Request) -> Any:
        trail = edge.trails.find(request_id, tenant=caller_of(request).tenant)
        if trail is None:
            raise NotFoundError(
                f"this gateway does not remember a request {request_id[:128]!r}; it keeps the latest ones "
                "only",
                code="request_not_found",
                param="request_id",
            )
        return trail.shown() | {"gateway": edge.settings.worker_id}


@asynccontextmanager
async def explaining(bus: Bus, trails: Trails, *, gateway: str) -> AsyncIterator[None]:
    """Answer operators who ask on ``epd.v1.explain.<request id>``; who does not know it says nothing."""

    async def on_question(message: Msg) -> None:
        trail = trails.find(message.subject.rpartition(".")[2])
        if trail is not None and subjects.is_inbox(message.reply):
            known = trail.shown() | {"gateway": gateway, "tenant": trail.tenant}
            await bus.emit_bytes(message.reply, json.dumps(known).encode())

    async with bus.listening(subjects.explain_subject("*"), on_question):
        yield


def _worker(record: WorkerRecord) -> dict[str, Any]:
    return {
        "role": record.role,
        "pd_role": record.pd_role if record.role == "pd" else "",
        "worker": record.worker,
        "node": record.node,
        "state": record.state,
        "phase": "" if record.role == "gateway" else record.phase,
        "error": record.error,
        "model": record.model,
        "slots": record.slots,
        "busy": record.busy,
        "encodes": record.encodes,
        "versions": record.versions,
    }


def _arenas(registry: Registry) -> list[dict[str, Any]]:
    """Of each node, as the latest of its workers saw it."""
    views = sorted(registry.workers(), key=lambda view: view.seen)
    nodes = {
        view.record.node: view.record
        for view in views
        if view.alive and view.record.arena_quota_bytes
    }
    return [
        {
            "node": node,
            "used_bytes": record.arena_used_bytes,
            "quota_bytes": record.arena_quota_bytes,
        }
        for node, record in sorted(nodes.items())
    ]
