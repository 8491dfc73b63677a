"""Sending a request: from an OpenAI body to jobs on the bus and a reply.

The gateway is this behind HTTP; the client library is this behind Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from epd_common.bus.registry import Registry
from epd_common.costs import Work, references, work_of, work_unseen
from epd_common.errors import BadRequestError, DeadlineError, NotFoundError, UnavailableError
from epd_common.ingest import Ingest
from epd_common.ingest.contents import PROMPT_FIELDS
from epd_common.ingest.fitting import check_fits
from epd_common.ingest.pipeline import Prepared
from epd_common.orders import OrderContext, Orders, Submitted
from epd_common.placing import Placing
from epd_common.protocol import GenerateJob, Item, WorkerRecord
from epd_common.protocol.subjects import ANY_PLACE
from epd_common.replies import Reply, ReplyHub
from epd_common.store import Claim, SizeTables
from epd_common.tasks import whole

ItemOrigin = Literal["encoded", "shared", "reused"]
"""``encoded`` for this request, ``shared`` with an encode under way, ``reused`` from a store."""

STAGE_MARGIN_S = 0.25
"""So long before the requester stops to wait the stages do, so that the error which names the stage and
the key that were waited for still reaches it. A tenth of the time where that is less."""

_ORIGINS: dict[str, ItemOrigin] = {"claimed": "encoded", "pending": "shared", "ready": "reused"}


EARLY_S = 120.0
"""What was not encoded so long after its upload is encoded when a request asks for it."""


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request on its way, and what became of its distinct media items.

    Attributes:
        ingested: When its media were loaded and checked, by the monotonic clock.
        published: When its jobs were given to the bus, by that clock.
        placed: How it was placed: ``any`` where placing is off or not for this one.
    """

    reply: Reply
    items: list[Item]
    origins: list[ItemOrigin]
    ingested: float
    published: float
    placed: str


class Entry(Protocol):
    """Lets one request in, where there is a bound on what may be under way.

    Attributes:
        yields: Its jobs go behind those of others.
    """

    yields: bool

    async def ask(self, worker: WorkerRecord, work: Work) -> None:
        """Ask for this work; again, where it turns out to be other than was thought.

        Raises:
            epd_common.errors.BusyError: there is no room; the request ends.
        """

    def close(self) -> None:
        """The request has ended."""


class Requester:
    """Submits requests of one process.

    Args:
        name: Key of the process's record in the registry. Workers end its requests when its heartbeat is
            missing; empty: those end by their deadlines alone.
        placing: Names the PD worker that a request is meant for; without it, any.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        ingest: Ingest,
        orders: Orders,
        hub: ReplyHub,
        sizes: SizeTables,
        name: str = "",
        placing: Placing | None = None,
    ) -> None:
        self._placing = placing
        self._sizes = sizes
        self._name = name
        self._registry = registry
        self._ingest = ingest
        self._orders = orders
        self._hub = hub

    @contextlib.asynccontextmanager
    async def send(
        self,
        route: str,
        body: dict[str, Any],
        *,
        timeout_s: float,
        scope: str = "",
        owner: str | None = None,
        priority: int = 0,
        entry: Entry | None = None,
        traceparent: str = "",
        request_id: str = "",
    ) -> AsyncIterator[SentRequest]:
        """Submit a request; leaving the context before its end cancels it.

        Args:
            route: e.g. ``/v1/chat/completions``.
            body: OpenAI body, media as URLs, data URIs or file ids.
            timeout_s: The request's deadline from now.
            scope: Cache scope (tenant).
            owner: The tenant whose uploads the body may name, and in whose quota its media are, where that is
                not the scope.
            priority: Lower is sooner.
            entry: Asked before anything is done for the request, and closed at its end.
            request_id: That nobody else has; one is made up where it is empty.

        Raises:
            EpdError: bad input, no worker, no room, a full queue, a broker that is away, a deadline that
                passed before the request could be submitted.
        """
        with contextlib.ExitStack() as at_end:
            if entry is not None:
                at_end.callback(entry.close)
            deadline = time.time() + timeout_s
            stage_deadline = deadline - min(STAGE_MARGIN_S, timeout_s / 10)
            worker = self.worker_for(body)
            owner = scope if owner is None else owner
            try:
                async with asyncio.timeout(stage_deadline - time.time()) as bound:
                    prepared = await self._prepare(route, body, worker, scope, owner, entry)
            except TimeoutError:
                if not bound.expired():
                    raise
                raise DeadlineError(
                    "the deadline passed while the request's media were fetched and checked",
                    stage="ingest",
                ) from None
            ingested = time.monotonic()
            request_id = request_id or secrets.token_hex(16)
            async with self._hub.expect(request_id, timeout_s=deadline - time.time()) as reply:
                job = GenerateJob(
                    request_id=request_id,
                    model=worker.model,
                    route=route,
                    body=msgspec.json.encode(prepared.body),
                    items=prepared.items,
                    inbox=reply.inbox,
                    deadline=stage_deadline,
                    priority=priority,
                    scope=scope,
                    traceparent=traceparent,
                    requester=self._name,
                )
                place, placed = ANY_PLACE, "any"
                background = entry is not None and entry.yields
                if self._placing is not None and not background and priority <= 0:
                    place, placed = at_end.enter_context(
                        self._placing.placed(route, prepared.body, prepared.items, worker)
                    )
                context = OrderContext(
                    model=worker.model,
                    fingerprint=worker.fingerprint,
                    request_id=request_id,
                    scope=scope,
                    owner=owner,
                    priority=priority,
                    deadline=stage_deadline,
                    traceparent=traceparent,
                    background=background,
                    place=place,
                )
                published = time.monotonic()
                async with self._submitted(job, context, reply) as claims:
                    origins = [_origin(claim) for claim in claims]
                    yield SentRequest(reply, prepared.items, origins, ingested, published, placed)

    async def _prepare(
        self,
        route: str,
        body: dict[str, Any],
        worker: WorkerRecord,
        scope: str,
        owner: str,
        entry: Entry | None,
    ) -> Prepared:
        """The request, let in, its media stored, and nothing known against it.

        Its work is estimated twice: before its media are loaded, so that a flood costs little, and then.
        """
        if entry is not None:
            work = work_unseen(route, body, max_model_len=worker.max_model_len)
            await entry.ask(worker, work)
        prepared = await self._ingest.prepare(
            route=route,
            body=body,
            fingerprint=worker.fingerprint,
            scope=scope,
            owner=owner,
            special_tokens=worker.special_tokens,
            special_token_ids=worker.special_token_ids,
            modalities=worker.modalities,
        )
        if not prepared.items:
            return prepared
        self.require_encoder(worker)
        found = await self._sizes.of(worker.fingerprint).look_up(prepared.items)
        rows = [None if size is None else size.rows for size in found]
        check_fits(
            references(route, prepared.body),
            rows,
            place=PROMPT_FIELDS[route],
            max_model_len=worker.max_model_len,
            max_item_rows=worker.max_item_rows,
        )
        if entry is not None:
            known = work_of(
                route, prepared.body, prepared.items, rows, max_model_len=worker.max_model_len
            )
            await entry.ask(worker, known)
        return prepared

    @contextlib.asynccontextmanager
    async def _submitted(
        self, job: GenerateJob, context: OrderContext, reply: Reply
    ) -> AsyncIterator[list[Claim]]:
        """A request on its way; left before the reply's end, it is taken back from wherever it is."""
        reply.submitted = True
        # Submitted whole also for a client that goes away meanwhile, as the job's place is known only then.
        submitting = asyncio.ensure_future(self._orders.submit(job, context))
        try:
            submitted = await whole(submitting)
            yield submitted.claims
        finally:
            if not reply.finished:
                reply.submitted = False
            # What could not be submitted was withdrawn there.
            if submitting.exception() is None:
                submitted = submitting.result()
                if submitted.body_ref or not reply.finished:
                    await whole(self._end(job, context, submitted, reply))

    async def _end(
        self, job: GenerateJob, context: OrderContext, submitted: Submitted, reply: Reply
    ) -> None:
        if not reply.finished:
            await self._orders.withdraw(job, submitted.sequence, "the requester went away")
        if submitted.body_ref:
            await self._orders.forget_body(submitted.body_ref, context)

    async def encode_early(self, item: Item, worker: WorkerRecord, *, scope: str) -> None:
        """Have an item encoded before any request asks for it."""
        context = OrderContext(
            model=worker.model,
            fingerprint=worker.fingerprint,
            request_id=f"upload-{item.digest[:16]}",
            scope=scope,
            deadline=time.time() + EARLY_S,
            background=True,
        )
        claims = await self._orders.claim([item], context)
        await self._orders.publish_encodes([item], claims, context)

    def worker_for(self, body: dict[str, Any]) -> WorkerRecord:
        """A PD worker of the model that the body asks for, preferably one whose encoders are there.

        Raises:
            BadRequestError: the body names no model.
            NotFoundError: nobody serves that model, and others are served.
            UnavailableError: its workers are not ready, or there are no workers at all.
        """
        model = body.get("model")
        if not isinstance(model, str) or not model:
            raise BadRequestError("the field 'model' must name a model", param="model")
        ready = self._registry.answering(model)
        if ready:
            encoders = {record.fingerprint for record in self._registry.encoding(model)}
            return next((record for record in ready if record.fingerprint in encoders), ready[0])
        workers = [view.record for view in self._registry.workers()]
        known = {record.model for record in workers if record.role in ("encoder", "pd")}
        if model in known or not known:
            raise UnavailableError(
                f"no PD worker of model {model!r} is ready", stage="generate", retry_after_s=5.0
            )
        raise NotFoundError(
            f"the model {model!r} does not exist; served here: {', '.join(sorted(known))}",
            code="model_not_found",
            param="model",
        )

    def require_encoder(self, worker: WorkerRecord) -> None:
        """Refuse a request with media that nobody could encode.

        Raises:
            UnavailableError: nobody who encodes for the worker's model and fingerprint is ready.
        """
        encoders = self._registry.encoding(worker.model)
        if not any(encoder.fingerprint == worker.fingerprint for encoder in encoders):
            raise UnavailableError(
                f"no encoder of model {worker.model!r} with fingerprint "
                f"{worker.fingerprint[:12]} is ready",
                stage="encode",
                retry_after_s=5.0,
            )


def _origin(claim: Claim) -> ItemOrigin:
    return _ORIGINS.get(claim.state, "shared")
