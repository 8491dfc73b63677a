"""Which addresses media may be fetched from, and the hosts for which an operator makes an exception."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(text)
    for text in (
        "100.64.0.0/10",  # carrier-grade NAT; one cloud keeps its metadata service in there
        "168.63.129.16/32",  # Azure's host agent, seen from every virtual machine
        "192.0.0.0/24",  # IETF protocol assignments, of which older Pythons know a part
        "192.88.99.0/24",  # 6to4 relays
        "3fff::/20",  # documentation
    )
)
"""What ``ipaddress`` takes for global in some Python versions, and what only looks public."""


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public Internet's, with all that it may wrap.

    An IPv4 address inside an IPv6 one (mapped, NAT64, 6to4) is judged as well, for a gateway on
    the way would send the packets there.
    """
    ip = ipaddress.ip_address(address)
    return all(_is_public(candidate) for candidate in (ip, *_embedded(ip)))


def _is_public(ip: _Address) -> bool:
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None or ip in _NAT64:
            return True  # Says nothing by itself; what it wraps is judged.
        if ip not in _GLOBAL_IPV6:
            return False
    return (
        ip.is_global
        and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)
        and not any(ip in network for network in _NOT_PUBLIC if network.version == ip.version)
    )


def _embedded(ip: _Address) -> list[_Address]:
    if isinstance(ip, ipaddress.IPv4Address):
        return []
    found: list[_Address] = [wrapped for wrapped in (ip.ipv4_mapped, ip.sixtofour) if wrapped]
    if ip in _NAT64:
        found.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
    return found


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """A host, on one port or (``None``) on any, for which plain http and any address are allowed."""

    host: str
    port: int | None = None


def parse_allowed_hosts(text: str) -> tuple[AllowedHost, ...]:
    """Read a comma-separated list of ``host[:port]``; an IPv6 address stands in brackets.

    Raises:
        ValueError: naming the entry that cannot be read.
    """
    found = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        try:
            parts = urlsplit(f"//{entry}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"{entry!r} is not a host[:port]: {error}") from error
        if not host or parts.netloc != entry or "@" in entry or "*" in entry:
            raise ValueError(f"{entry!r} is not a host[:port]")
        found.append(AllowedHost(host, port))
    return tuple(found)


def is_allowed(allowed: Collection[AllowedHost], host: str, port: int) -> bool:
    host = host.lower()
    return AllowedHost(host) in allowed or AllowedHost(host, port) in allowed
