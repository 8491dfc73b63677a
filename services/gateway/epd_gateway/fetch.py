"""Fetches media from URLs that clients name, as if each of them were an attack.

https and public addresses alone, unless an operator allows a host; no proxies, cookies, credentials or
compression; few redirects, each judged like a first URL; bounded in bytes and in time. Errors name the
host that the client wrote, and nothing that was learnt on the way.

Connections are taken in turn by tenant, of whom none has more than half, so that hosts that never answer hold
up those alone who name them.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Self

import httpcore
import httpx

from epd_common.errors import BadRequestError, BusyError
from epd_common.ingest import FetchedMedia
from epd_common.ingest.limits import media_too_large
from epd_common.places import FairPlaces, LineFullError
from epd_gateway.addresses import AllowedHost, is_allowed
from epd_gateway.connect import AddressRefusedError, CheckedBackend, Resolver, resolve

WAITING_EACH = 16
"""Fetches that may wait for each connection before further ones are refused at once."""

_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_URL_LENGTH = 8192
_PORTS = {"http": 80, "https": 443}
_HEADERS = (
    ("Accept", "image/png, image/jpeg, image/webp, image/gif, image/bmp, image/tiff, */*;q=0.1"),
    # What is compressed could unpack to any size, and pictures do not gain by it.
    ("Accept-Encoding", "identity"),
    ("User-Agent", "epdflow"),
)


class MediaFetcher:
    """Fetches media under limits. Use as an async context manager; :meth:`fetch` is an ingest ``Fetch``.

    Args:
        allowed: Hosts for which plain http and addresses of any kind are allowed.
        max_bytes: Most bytes of one answer.
        timeout_s: Seconds for one URL, name resolution and redirects included.
        max_redirects: Redirects that are followed.
        max_connections: Connections at the same time. Further fetches wait, also for ``timeout_s``, before
            their own time begins.
        several: Whether there are tenants to protect from each other; else one may have all connections.
        resolver: Finds the addresses of a host; by default the system's.
        network: What connects; by default TCP.
        tls: TLS settings; by default those of the ``certifi`` authorities.
    """

    def __init__(
        self,
        *,
        allowed: Collection[AllowedHost] = (),
        max_bytes: int,
        timeout_s: float,
        max_redirects: int = 3,
        max_connections: int = 64,
        several: Callable[[], bool] = lambda: False,
        resolver: Resolver = resolve,
        network: httpcore.AsyncNetworkBackend | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._allowed = allowed
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._max_redirects = max_redirects
        self._places = FairPlaces(
            max_connections,
            share=max(1, max_connections // 2),
            line=WAITING_EACH * max_connections,
            several=several,
        )
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=tls or httpx.create_ssl_context(trust_env=False),
            max_connections=max_connections,
            keepalive_expiry=5.0,
            network_backend=CheckedBackend(allowed, resolver, network or httpcore.AnyIOBackend()),
        )

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._pool.__aexit__(kind, error, trace)

    async def fetch(self, url: str, place: str, *, owner: str = "") -> FetchedMedia:
        """Fetch one URL.

        Args:
            url: The URL as the client wrote it.
            place: Where it stands in the request, for errors.
            owner: The tenant whose turn it takes.

        Raises:
            BusyError: ``media_fetch_busy``, if no connection was free in time.
            BadRequestError: ``media_url_refused``, ``media_fetch_failed`` or ``media_fetch_timeout``.
            TooLargeError: ``media_too_large``.
        """
        target = self._parse(url.strip(), place)
        await self._take_place(owner, place)
        try:
            return await self._fetch(target, place)
        finally:
            self._places.give_back(owner)

    async def _take_place(self, owner: str, place: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._places.take(owner)
        except (TimeoutError, LineFullError):
            raise BusyError(
                f"the URL at {place} could not be fetched yet, as too many others are being fetched; "
                "try again in a moment",
                code="media_fetch_busy",
                param=place,
                stage="ingest",
                retry_after_s=5.0,
            ) from None

    async def _fetch(self, target: httpx.URL, place: str) -> FetchedMedia:
        host = target.host
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(target, place)
        except (TimeoutError, httpcore.TimeoutException):
            reason = f"{host!r} did not deliver it within {self._timeout_s} s"
            raise _failed(place, reason, "media_fetch_timeout") from None
        except AddressRefusedError:
            reason = f"{host!r} leads to an address that is not public"
            raise _refused(place, reason) from None
        except (httpcore.NetworkError, httpcore.ProtocolError):
            reason = f"{host!r} cannot be reached, or broke off"
            raise _failed(place, reason) from None

    async def _follow(self, target: httpx.URL, place: str) -> FetchedMedia:
        host = target.host
        for _ in range(self._max_redirects + 1):
            answer = await self._get(target, host, place)
            if isinstance(answer, FetchedMedia):
                return answer
            target = self._parse(answer, place, base=target)
        raise _refused(place, f"{host!r} redirects more than {self._max_redirects} times")

    async def _get(self, url: httpx.URL, host: str, place: str) -> FetchedMedia | str:
        """The media, or where the server sends us instead. ``host`` is the client's, for errors."""
        headers = [("Host", url.netloc.decode("ascii")), *_HEADERS]
        raw_url = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        # One address that does not answer must leave time for the next.
        extensions = {"timeout": {"connect": self._timeout_s / 3}}
        async with self._pool.stream(
            "GET", raw_url, headers=headers, extensions=extensions
        ) as answer:
            received = {name.lower(): value.decode("latin-1") for name, value in answer.headers}
            if answer.status in _REDIRECTS and b"location" in received:
                return received[b"location"]
            if answer.status != 200:
                raise _failed(place, f"{host!r} answered with status {answer.status}")
            if received.get(b"content-encoding", "identity").lower() != "identity":
                raise _failed(place, f"{host!r} sent it compressed, though asked not to")
            length = received.get(b"content-length", "")
            if length.isdecimal() and int(length) > self._max_bytes:
                raise media_too_large(place, self._max_bytes, int(length))
            data = bytearray()
            async for chunk in answer.aiter_stream():
                data += chunk
                if len(data) > self._max_bytes:
                    raise media_too_large(place, self._max_bytes)
            return FetchedMedia(bytes(data), received.get(b"content-type", ""))

    def _parse(self, text: str, place: str, base: httpx.URL | None = None) -> httpx.URL:
        """Check everything about a URL that can be seen without the network."""
        subject = "it" if base is None else "a redirect"
        if len(text) > _MAX_URL_LENGTH:
            raise _refused(place, f"{subject} has more than {_MAX_URL_LENGTH} characters")
        try:
            url = httpx.URL(text) if base is None else base.join(text)
        except (httpx.InvalidURL, ValueError):
            raise _refused(place, f"{subject} is not a valid URL") from None
        if url.scheme not in _PORTS or not url.host:
            raise _refused(place, f"{subject} does not begin with https:// and a host")
        if url.userinfo:
            raise _refused(place, f"{subject} has a user name or a password in it")
        port = _PORTS[url.scheme] if url.port is None else url.port
        if not 0 < port < 65536:
            raise _refused(place, f"{subject} has a port that does not exist")
        if url.scheme == "http" and not is_allowed(self._allowed, url.raw_host.decode(), port):
            raise _refused(place, f"{subject} uses http; only https is allowed")
        return url


def _refused(place: str, reason: str) -> BadRequestError:
    return _failed(place, reason, "media_url_refused", "is refused")


def _failed(
    place: str, reason: str, code: str = "media_fetch_failed", verb: str = "cannot be fetched"
) -> BadRequestError:
    return BadRequestError(
        f"the URL at {place} {verb}: {reason}", code=code, param=place, stage="ingest"
    )
