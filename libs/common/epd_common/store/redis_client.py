"""The connection to Valkey or Redis, and one way to say that it is away."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import redis.exceptions
from redis.asyncio import BlockingConnectionPool, Redis

from epd_common.errors import UnavailableError
from epd_common.seldom import Seldom
from epd_common.store.base import StoreFullError
from epd_common.store.shared_connection import SharingRedis

logger = logging.getLogger(__name__)

SOCKET_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
"""Of one process; in a burst further ones wait for one of these."""

_FULL = Seldom(every_s=60.0)


@contextlib.asynccontextmanager
async def open_redis(url: str, *, ca: Path | None = None) -> AsyncIterator[Redis]:
    """Open and check the connection.

    Args:
        ca: Certificates (PEM) that the server's may be signed by, for a ``rediss://`` URL.

    Raises:
        UnavailableError: nothing answers there, or it refuses the password.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=SOCKET_TIMEOUT_S,  # for a connection that is free
        decode_responses=False,  # values are blobs
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=SOCKET_TIMEOUT_S,
        health_check_interval=15,
        **({} if ca is None else {"ssl_ca_certs": str(ca)}),
    )
    client = SharingRedis(pool, timeout_s=SOCKET_TIMEOUT_S)
    try:
        with redis_errors():
            await client.ping()
        yield client
    finally:
        await client.aclose()


@contextlib.contextmanager
def redis_errors() -> Iterator[None]:
    """Turn redis-py's errors into ours."""
    try:
        yield
    except redis.exceptions.OutOfMemoryError as error:
        if _FULL.now():
            logger.error(
                "Redis has no memory left (maxmemory with noeviction), so requests with media are refused; "
                "raise maxmemory, or shorten EPD_EMBEDDING_TTL_S and EPD_MEDIA_TTL_S"
            )
        raise StoreFullError(
            "the store of media and embeddings is full; try again later", retry_after_s=1.0
        ) from error
    except redis.exceptions.NoPermissionError as error:
        raise UnavailableError(
            "Redis refuses a command to this service's user; give it the rights of its role "
            "(deploy/valkey/users.conf)",
            code="redis_unavailable",
        ) from error
    except (redis.exceptions.RedisError, OSError) as error:
        raise UnavailableError(
            f"Redis does not answer ({type(error).__name__}: {error}); is it running, and is "
            "EPD_REDIS_URL right?",
            code="redis_unavailable",
            retry_after_s=1.0,
        ) from error


def as_bytes(value: object) -> bytes:
    """A value of Redis as the bytes that it is: the client never decodes, its types cannot say so."""
    if not isinstance(value, bytes):
        raise TypeError(f"expected bytes from Redis, got {type(value).__name__}")
    return value


def address(url: str) -> str:
    """Where a Redis URL points, without credentials."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
