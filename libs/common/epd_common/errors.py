"""Every error a user of the system can meet, with the one mapping to HTTP and to the bus.

One root, :class:`EpdError`; a subclass per kind of fault, each with its HTTP status. An error carries
fields (stage, key, request id, the body's field) so that a message can say what happened, where, and
what to do, and so that logs can be searched.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar


class EpdError(Exception):
    """Root of all errors of epdflow.

    Args:
        message: What happened, where, and what to do; safe to show to a client.
        code: A stable machine-readable word, e.g. ``media_url_refused``.
        param: The field of the request body at fault, e.g. ``messages[0].content[1].image_url``.
        stage: The stage that failed or was waited for: ``ingest``, ``encode``, ``generate``, ...
        key: The embedding key the stage waited for, if any.
        retry_after_s: Seconds after which trying again makes sense.
    """

    status: ClassVar[int] = 500
    default_code: ClassVar[str] = "internal_error"
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        stage: str | None = None,
        key: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.stage = stage
        self.key = key
        self.retry_after_s = retry_after_s or self.default_retry_after_s

    def headers(self) -> dict[str, str]:
        """Headers of the HTTP answer: ``Retry-After`` in whole seconds, where trying again makes sense."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}

    def fields(self) -> dict[str, Any]:
        """The structured fields that are set, for logs."""
        names = ("code", "param", "stage", "key")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}


class BadRequestError(EpdError):
    """The request can never work as it is."""

    status = 400
    default_code = "invalid_request"


class UnauthorizedError(EpdError):
    """No API key, or a wrong one."""

    status = 401
    default_code = "invalid_api_key"


class NotFoundError(EpdError):
    """No such model, file or route."""

    status = 404
    default_code = "not_found"


class MethodNotAllowedError(EpdError):
    """The route exists, with another method."""

    status = 405
    default_code = "method_not_allowed"


class RequestTimeoutError(EpdError):
    """The client took too long to send its request."""

    status = 408
    default_code = "request_timeout"


class ConflictError(EpdError):
    """A request with this id is already running."""

    status = 409
    default_code = "duplicate_request"


class TooLargeError(EpdError):
    """A body, a picture or a count above its limit."""

    status = 413
    default_code = "too_large"


class UnsupportedMediaError(EpdError):
    """Bytes that are not what their type says, or a type nobody reads here."""

    status = 415
    default_code = "unsupported_media"


class HeadTooLargeError(EpdError):
    """A request line and headers above their limit."""

    status = 431
    default_code = "headers_too_large"


class BusyError(EpdError):
    """A queue or a share is full."""

    status = 429
    default_code = "overloaded"
    default_retry_after_s = 1.0


class RequestCancelledError(EpdError):
    """Somebody cancelled the request."""

    status = 499
    default_code = "cancelled"


class UpstreamError(EpdError):
    """A stage failed for this request: an encoder gave up, an engine refused."""

    status = 502
    default_code = "stage_failed"


class UnavailableError(EpdError):
    """No worker of that model, or a broker is away."""

    status = 503
    default_code = "unavailable"
    default_retry_after_s = 2.0


class LoginRefusedError(UnavailableError):
    """A broker is there and does not let this process in: waiting does not help."""


class SendAgainError(EpdError):
    """A store lost what the request brought, or is full. No other worker can help; sent again it may work."""

    status = 503
    default_code = "media_gone"


class DeadlineError(EpdError):
    """The request's deadline passed; the message names the stage."""

    status = 504
    default_code = "deadline_exceeded"


ERROR_TYPES: dict[int, type[EpdError]] = {
    cls.status: cls
    for cls in (
        BadRequestError,
        UnauthorizedError,
        NotFoundError,
        MethodNotAllowedError,
        RequestTimeoutError,
        ConflictError,
        TooLargeError,
        UnsupportedMediaError,
        BusyError,
        HeadTooLargeError,
        RequestCancelledError,
        UpstreamError,
        UnavailableError,
        DeadlineError,
    )
}

_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def openai_body(error: EpdError) -> dict[str, Any]:
    """The error in OpenAI's shape, with ``stage`` and ``key`` added where known."""
    default = "invalid_request_error" if error.status < 500 else "server_error"
    inner: dict[str, Any] = {
        "message": error.message,
        "type": _OPENAI_TYPES.get(error.status, default),
        "param": error.param,
        "code": error.code,
    }
    if error.stage is not None:
        inner["stage"] = error.stage
    if error.key is not None:
        inner["key"] = error.key
    return {"error": inner}


def from_status(status: int, message: str, **fields: Any) -> EpdError:
    """Rebuild an error that travelled over the bus; what is no error status counts as a failed stage."""
    if not 400 <= status <= 599:
        return UpstreamError(message or f"a stage failed with status {status}", **fields)
    return ERROR_TYPES.get(status, EpdError)(message, **fields)
