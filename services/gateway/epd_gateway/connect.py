"""Connects to addresses that were checked, and to no others.

The check sits where the connection is made: the name is resolved once, all its addresses are judged, and
the connection goes to one of exactly those. A name that resolves to something else a moment later (DNS
rebinding) gains nothing. TLS still sees the name, as the layer above asks for it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable

import httpcore

from epd_gateway.addresses import AllowedHost, is_allowed, is_public

Resolver = Callable[[str, int], Awaitable[list[str]]]
"""``await resolve(host, port)``: the IP addresses of a host, best first."""

_SocketOption = (
    tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]
)


class AddressRefusedError(Exception):
    """The host has an address that is not public. The text names no address, for clients read it."""


async def resolve(host: str, port: int) -> list[str]:
    """Resolve through the system, in a thread."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """The network as ``httpcore`` sees it, reduced to allowed addresses.

    Args:
        allowed: Hosts whose addresses are not judged.
        resolver: Finds the addresses of a host.
        network: What really connects.
    """

    def __init__(
        self,
        allowed: Collection[AllowedHost],
        resolver: Resolver,
        network: httpcore.AsyncNetworkBackend,
    ) -> None:
        self._allowed = allowed
        self._resolve = resolver
        self._network = network

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[_SocketOption] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address of the host that answers.

        Raises:
            AddressRefusedError: One of the addresses is not public.
            httpcore.ConnectError: There is no address, or none answers.
        """
        addresses = await self._resolve(host, port)
        if not is_allowed(self._allowed, host, port) and not all(map(is_public, addresses)):
            raise AddressRefusedError
        failure: Exception = httpcore.ConnectError("the host name cannot be resolved")
        for address in addresses:
            try:
                return await self._network.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[_SocketOption] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Never: a URL cannot name a local socket."""
        raise AddressRefusedError

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)
