"""The routes of the gateway."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import redis.exceptions
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from redis.asyncio import Redis
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from epd_common.accounts import Account
from epd_common.bus import Bus, Registry
from epd_common.errors import (
    BadRequestError,
    DeadlineError,
    EpdError,
    MethodNotAllowedError,
    NotFoundError,
    UnavailableError,
    UnsupportedMediaError,
    from_status,
    openai_body,
)
from epd_common.ingest import Ingest
from epd_common.ingest.body import CHAT, COMPLETIONS, RESPONSES, parse_body
from epd_common.replies import ReplyHub
from epd_common.requester import Requester
from epd_common.store import MediaStore
from epd_common.telemetry.traces import Tracer
from epd_gateway import spans
from epd_gateway.auth import KeyRing, RequireKey, caller_of
from epd_gateway.bodies import read_body
from epd_gateway.door import Door
from epd_gateway.draining import CloseWhileDraining
from epd_gateway.files import add_file_routes
from epd_gateway.live import add_live_routes
from epd_gateway.metrics import GatewayMetrics
from epd_gateway.openapi import openapi_document
from epd_gateway.page import add_page_routes
from epd_gateway.relay import CLIENT_GONE, Relay, outcome
from epd_gateway.request_ids import HEADER, NameRequests, request_id_of
from epd_gateway.settings import GatewaySettings
from epd_gateway.short_way import ShortWay
from epd_gateway.stored_responses import add_stored_response_routes
from epd_gateway.trails import Trail, Trails

logger = logging.getLogger(__name__)

PROBE_S = 1.5
"""What Valkey gets to answer ``/ready``, which itself must be quick: load balancers wait a few seconds."""

SEND_GRACE_S = 30.0
"""So long after its deadline a slow client may still read what there is of its answer."""

MAX_PRIORITY = 999_999
GENERATE_ROUTES = (CHAT, COMPLETIONS, RESPONSES)


@dataclass(slots=True)
class Edge:
    """What the routes use."""

    settings: GatewaySettings
    keys: KeyRing
    bus: Bus
    redis: Redis
    registry: Registry
    requester: Requester
    ingest: Ingest
    media: MediaStore
    hub: ReplyHub
    door: Door
    metrics: GatewayMetrics
    tracer: Tracer
    started: float = field(default_factory=time.time)
    draining: bool = False
    requests: Account = field(default_factory=Account)
    trails: Trails = field(default_factory=Trails)

    async def not_ready(self) -> str | None:
        """Why requests would fail now; None if they would not."""
        if self.draining:
            return "the gateway is shutting down"
        if not self.bus.connected:
            return "NATS is not connected"
        try:
            async with asyncio.timeout(PROBE_S):
                await self.redis.ping()
        except (redis.exceptions.RedisError, OSError, TimeoutError):
            return "Redis does not answer"
        for model in self.registry.models():
            prints = {record.fingerprint for record in self.registry.answering(model)}
            if any(e.fingerprint in prints for e in self.registry.encoding(model)):
                return None
        return "no model has both a PD worker and an encoder that are ready"

    def audit(self) -> dict[str, Any]:
        """What came to this gateway, what became of it, and what it holds now."""
        return {
            "role": "gateway",
            "node": self.settings.node,
            "pid": os.getpid(),
            "requests": self.requests.report(),
            "replies": self.hub.report(),
        }

    def health(self) -> dict[str, Any]:
        """What the micro service's health endpoint answers."""
        return {"ok": not self.draining, "open_requests": self.hub.open_replies}


def build_app(edge: Edge) -> FastAPI:
    """The HTTP application."""
    app = FastAPI(title="epdflow gateway", docs_url=None, redoc_url=None, openapi_url=None)
    _add_error_handlers(app)
    handlers = {route: _generate(edge, route) for route in GENERATE_ROUTES}
    app.add_middleware(ShortWay, handlers=handlers, refuse=_error_response)
    app.add_middleware(
        RequireKey,
        keys=edge.keys,
        cache_scope=edge.settings.cache_scope,
        refused=edge.metrics.refused,
    )
    app.add_middleware(CloseWhileDraining, draining=lambda: edge.draining)
    app.add_middleware(NameRequests)  # around all others
    for route, handler in handlers.items():  # for what the short way leaves: other methods
        app.add_route(route, handler, methods=["POST"])
    add_stored_response_routes(app)
    add_file_routes(app, edge)
    add_live_routes(app, edge)
    add_page_routes(app)
    described = openapi_document()

    @app.get("/v1/models")
    async def models() -> Any:
        return {
            "object": "list",
            "data": [_model_card(edge, name) for name in edge.registry.models()],
        }

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Any:
        if name not in edge.registry.models():
            raise NotFoundError(
                f"the model {name!r} does not exist", code="model_not_found", param="model"
            )
        return _model_card(edge, name)

    @app.get("/health")
    async def health() -> Any:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        reason = await edge.not_ready()
        if reason is None:
            return JSONResponse({"status": "ready", "models": edge.registry.models()})
        return _error_response(UnavailableError(reason, code="not_ready", retry_after_s=2.0))

    @app.get("/openapi.json")
    async def document() -> Any:
        return described

    @app.get("/metrics")
    async def metrics() -> Response:
        edge.metrics.open_requests.set(edge.hub.open_replies)
        await edge.metrics.look(edge.bus, edge.registry)
        edge.metrics.show_account(edge.requests)
        return Response(generate_latest(edge.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _generate(edge: Edge, route: str) -> Callable[[Request], Awaitable[Response]]:
    """The handler of a route whose body becomes a generate job."""

    async def handler(request: Request) -> Response:
        started = time.monotonic()
        entry = edge.requests.enter()
        try:
            caller = caller_of(request)
            timeout_s = _deadline(request, edge.settings.deadline_s)
            body = await _body_within(request, edge.settings, timeout_s)
            priority = _priority(body, caller.most_urgent)
        except BaseException as error:
            status = _status_of(error)
            entry.end(outcome(status))
            edge.metrics.requests.labels(route, status).inc()
            raise
        timeout_s -= time.monotonic() - started
        request_id = request_id_of(request)
        trail = Trail(
            request_id=request_id,
            route=route,
            tenant=caller.tenant,
            model=body.get("model"),
            stream=body.get("stream") is True,
            started=started,
        )
        span = spans.begin(
            edge.tracer,
            route=route,
            request_id=request_id,
            model=body.get("model"),
            parent=request.headers.get("traceparent", ""),
        )
        return Relay(
            trail=edge.trails.begin(trail),
            span=span,
            explain=request.headers.get("x-epd-explain", "").lower() in ("1", "true"),
            entry=entry,
            send=edge.requester.send(
                route,
                body,
                timeout_s=timeout_s,
                scope=caller.scope,
                owner=caller.tenant,
                priority=priority,
                entry=edge.door.entry(caller, timeout_s=timeout_s),
                traceparent=span.traceparent,
                request_id=request_id,
            ),
            metrics=edge.metrics,
            route=route,
            started=started,
            timeout_s=timeout_s + SEND_GRACE_S,
        )

    return handler


def _status_of(error: BaseException) -> int:
    """With which a request ends that never reached a relay."""
    if isinstance(error, EpdError):
        return error.status
    gone = isinstance(error, asyncio.CancelledError | ClientDisconnect)
    return CLIENT_GONE if gone else EpdError.status


def _deadline(request: Request, default_s: float) -> float:
    text = request.headers.get("x-epd-deadline-s")
    if text is None:
        return default_s
    try:
        wanted = float(text)
    except ValueError:
        wanted = 0.0
    if not 0 < wanted < float("inf"):
        raise BadRequestError(
            f"the header x-epd-deadline-s must be seconds above 0, not {text[:40]!r}",
            param="x-epd-deadline-s",
        )
    return min(wanted, default_s)


def _priority(body: dict[str, Any], most_urgent: int | None) -> int:
    """The body's ``priority``, as vLLM has it: lower is sooner."""
    value = body.get("priority")
    if value is None:
        return 0
    if type(value) is not int or abs(value) > MAX_PRIORITY:
        raise BadRequestError(
            f"priority must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}; lower is sooner",
            param="priority",
            stage="ingest",
        )
    if most_urgent is not None and value < most_urgent:
        raise BadRequestError(
            f"this API key may ask for no priority below {most_urgent}, and the request has {value}",
            code="priority_not_allowed",
            param="priority",
            stage="ingest",
        )
    return value


async def _body_within(
    request: Request, settings: GatewaySettings, timeout_s: float
) -> dict[str, Any]:
    try:
        async with asyncio.timeout(timeout_s):
            return await _json_body(request, settings)
    except TimeoutError:
        raise DeadlineError(
            "the deadline passed before the request's body was here", stage="ingest"
        ) from None


async def _json_body(request: Request, settings: GatewaySettings) -> dict[str, Any]:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise UnsupportedMediaError(
            f"the request's content type must be application/json, not {content_type[:80]!r}",
            code="unsupported_content_type",
        )
    raw = await read_body(request, settings.max_body_bytes, within_s=settings.body_timeout_s)
    return parse_body(raw)


def _model_card(edge: Edge, name: str) -> dict[str, Any]:
    record = edge.registry.answering(name)[0]
    return {
        "id": name,
        "object": "model",
        "created": int(edge.started),
        "owned_by": "epdflow",
        "max_model_len": record.max_model_len,
    }


def _error_response(error: EpdError) -> JSONResponse:
    return JSONResponse(openai_body(error), status_code=error.status, headers=error.headers())


def _add_error_handlers(app: FastAPI) -> None:
    """OpenAI's error shape for whatever goes wrong."""

    @app.exception_handler(EpdError)
    async def known(request: Request, error: EpdError) -> JSONResponse:
        return _error_response(error)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            return _error_response(
                NotFoundError(f"there is no route {request.url.path}", code="unknown_route")
            )
        if error.status_code == 405:
            response = _error_response(
                MethodNotAllowedError(
                    f"the route {request.url.path} does not take {request.method}"
                )
            )
            response.headers.update(error.headers or {})
            return response
        return _error_response(from_status(error.status_code, str(error.detail)))

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> JSONResponse:
        logger.error(
            "unexpected error in %s",
            request.url.path,
            exc_info=error,
            extra={"request_id": request_id_of(request)},
        )
        answer = _error_response(EpdError("an unexpected error in the gateway; its log says more"))
        answer.headers[HEADER] = request_id_of(request)  # this is outside of what names them
        return answer
