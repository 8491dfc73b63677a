"""Reading request bodies under a limit."""

from __future__ import annotations

from fastapi import Request
from starlette.requests import ClientDisconnect

from epd_common.errors import BadRequestError, TooLargeError


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, at most ``limit`` bytes; it is refused before more than that is held.

    Raises:
        TooLargeError: the body is, or claims to be, above the limit.
    """
    claimed = request.headers.get("content-length", "")
    if claimed.isdigit() and int(claimed) > limit:
        raise _too_large(limit)
    chunks = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise BadRequestError("the client went away before its body was complete") from error
    return b"".join(chunks)


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(
        f"the request's body has more than {limit} bytes (EPD_MAX_BODY_BYTES)",
        code="body_too_large",
    )
