"""Reading request bodies under a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request
from starlette.requests import ClientDisconnect

from epd_common.errors import BadRequestError, RequestTimeoutError, TooLargeError


@asynccontextmanager
async def arriving(within_s: float) -> AsyncIterator[None]:
    """Bounds the time in which a body is read.

    Raises:
        RequestTimeoutError: it took longer.
        BadRequestError: the client went away.
    """
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        raise RequestTimeoutError(
            f"the request's body did not come within {within_s:g} s (EPD_BODY_TIMEOUT_S)"
        ) from None
    except ClientDisconnect as error:
        raise BadRequestError("the client went away before its body was complete") from error


async def read_body(request: Request, limit: int, *, within_s: float) -> bytes:
    """The whole body, at most ``limit`` bytes; it is refused before more than that is held.

    Raises:
        RequestTimeoutError: it did not come within ``within_s``.
        TooLargeError: the body is, or claims to be, above the limit.
    """
    claimed = request.headers.get("content-length", "")
    if claimed.isdigit() and int(claimed) > limit:
        raise _too_large(limit)
    chunks = []
    size = 0
    async with arriving(within_s):
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(
        f"the request's body has more than {limit} bytes (EPD_MAX_BODY_BYTES)",
        code="body_too_large",
    )
