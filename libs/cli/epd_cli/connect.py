"""Connections of the commands: as an operator, with what the environment says of logins and certificates."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from redis.asyncio import Redis

from epd_common import client
from epd_common.bus import Bus
from epd_common.protocol.subjects import inbox_prefix
from epd_common.settings import CommonSettings, load_settings
from epd_common.store import open_redis

CONNECT_WITHIN_S = 5.0
"""Somebody waits for the answer."""

INBOX = inbox_prefix("operator")


def operator_bus(nats_url: str, *, name: str) -> Bus:
    """A connection to NATS, not yet open."""
    login = load_settings(CommonSettings, nats_url=nats_url).nats_login()
    return Bus(nats_url, name=name, login=login, inbox=INBOX, connect_within_s=CONNECT_WITHIN_S)


def operator_redis(redis_url: str) -> AbstractAsyncContextManager[Redis]:
    """A connection to Valkey, not yet open."""
    settings = load_settings(CommonSettings, redis_url=redis_url)
    return open_redis(redis_url, ca=settings.redis_ca, password_file=settings.redis_password_file)


def operator_client(nats_url: str, redis_url: str) -> AbstractAsyncContextManager[client.Client]:
    """The Python client, not yet connected."""
    settings = load_settings(CommonSettings, nats_url=nats_url, redis_url=redis_url)
    return client.connect(
        nats_url,
        redis_url,
        login=settings.nats_login(),
        redis_ca=settings.redis_ca,
        redis_password_file=settings.redis_password_file,
        inbox=INBOX,
    )
