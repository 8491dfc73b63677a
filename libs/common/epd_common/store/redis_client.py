"""The connection to Valkey or Redis, and one way to say that it is away."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis.exceptions
from redis.asyncio import BlockingConnectionPool, Redis

from epd_common.errors import LoginRefusedError, UnavailableError
from epd_common.login import read_password
from epd_common.seldom import Seldom
from epd_common.store.base import StoreFullError
from epd_common.store.shared_connection import SharingRedis

logger = logging.getLogger(__name__)

SOCKET_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
"""Of one process; in a burst further ones wait for one of these."""

_FULL = Seldom(every_s=60.0)


@contextlib.asynccontextmanager
async def open_redis(
    url: str, *, ca: Path | None = None, password_file: Path | None = None
) -> AsyncIterator[Redis]:
    """Open and check the connection.

    Args:
        ca: Certificates (PEM) that the server's may be signed by, for a ``rediss://`` URL.
        password_file: A file with the password, for a URL that has none.

    Raises:
        UnavailableError: nothing answers there.
        LoginRefusedError: it refuses user or password.
    """
    more: dict[str, Any] = {} if ca is None else {"ssl_ca_certs": str(ca)}
    if password_file is not None:
        more["password"] = read_password(password_file, "EPD_REDIS_PASSWORD_FILE")
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=SOCKET_TIMEOUT_S,  # for a connection that is free
        decode_responses=False,  # values are blobs
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=SOCKET_TIMEOUT_S,
        health_check_interval=15,
        **more,
    )
    client = SharingRedis(pool, timeout_s=SOCKET_TIMEOUT_S)
    try:
        with redis_errors():
            try:
                await client.ping()
            except redis.exceptions.ConnectionError as error:
                # While it connects redis-py has it as the cause of a general one.
                refused = redis.exceptions.AuthenticationError
                if not isinstance(error, refused) and not isinstance(error.__cause__, refused):
                    raise
                raise LoginRefusedError(
                    f"Redis at {address(url)} refuses the login ({error}); are user and password in its URL "
                    "(EPD_REDIS_URL, or --redis) right?",
                    code="redis_unavailable",
                ) from error
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
