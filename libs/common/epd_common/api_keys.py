"""API keys: how they are made, and how the entries look that let them in. No I/O.

An entry holds the SHA-256 of a key and never the key, so that whoever reads a file of entries cannot use
them. A key has 256 random bits, which nobody finds by trying; a slow hash, made for passwords, would gain
nothing.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

CacheScope = Literal["tenant", "shared"]

KEY_PREFIX = "epd-"
_HASH_PREFIX = "sha256:"
_HASH = re.compile(r"[0-9a-f]{64}")
_PRIORITY = re.compile(r"-?[0-9]{1,6}")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FIELDS = ("tenant", "name", "weight", "cache_scope", "priority")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An entry.

    Attributes:
        hash: SHA-256 of the key, 64 lower-case hex characters.
        tenant: Whose key it is. Keys of one tenant share its files and its cache.
        name: For people, who tell a tenant's keys apart by it.
        weight: The tenant's share of the system relative to others.
        cache_scope: Whether its embeddings are the tenant's own; None leaves that to the gateway's setting.
        priority: The most urgent that it may ask for; lower is sooner.
    """

    hash: str
    tenant: str
    name: str = ""
    weight: float = 1.0
    cache_scope: CacheScope | None = None
    priority: int = 0

    def line(self) -> str:
        """The entry as it is written: ``sha256:HASH tenant=T`` and what differs from the defaults."""
        words = [_HASH_PREFIX + self.hash, f"tenant={self.tenant}"]
        words += [f"name={self.name}"] if self.name else []
        words += [f"weight={self.weight:g}"] if self.weight != 1.0 else []
        words += [f"cache_scope={self.cache_scope}"] if self.cache_scope else []
        words += [f"priority={self.priority}"] if self.priority else []
        return " ".join(words)


def new_key() -> str:
    """A key that nobody has: 43 characters after its prefix, 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: bytes) -> str:
    """What entries hold of a key."""
    return hashlib.sha256(key).hexdigest()


def parse_file(text: str) -> tuple[ApiKey, ...]:
    """Read a file of entries, one a line; empty lines and those that begin with ``#`` say nothing.

    Raises:
        ValueError: naming the line and the reason, and nothing of what is written there: it may be a key.
    """
    return _parse(enumerate(text.splitlines(), 1), "line")


def parse_list(text: str) -> tuple[ApiKey, ...]:
    """Read entries from one value, with ``;`` between them.

    Raises:
        ValueError: naming the entry by its number, and the reason.
    """
    return _parse(enumerate(text.split(";"), 1), "entry")


def _parse(numbered: Iterable[tuple[int, str]], what: str) -> tuple[ApiKey, ...]:
    found: dict[str, ApiKey] = {}
    for number, entry in numbered:
        words = entry.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key = _entry(words)
            if key.hash in found:
                raise ValueError("this key has an entry already")
        except ValueError as error:
            raise ValueError(f"{what} {number}: {error}") from None
        found[key.hash] = key
    return tuple(found.values())


def _entry(words: list[str]) -> ApiKey:
    digest = words[0].removeprefix(_HASH_PREFIX)
    if not words[0].startswith(_HASH_PREFIX) or _HASH.fullmatch(digest) is None:
        raise ValueError(
            "it must begin with sha256: and 64 lower-case hex digits, the hash of a key as "
            "`epd key new` prints it"
        )
    fields: dict[str, str] = {}
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name not in _FIELDS or name in fields:
            raise ValueError(
                f"after the hash come, once each and as NAME=VALUE: {', '.join(_FIELDS)}"
            )
        fields[name] = value
    for name in ("tenant", "name"):
        if NAME.fullmatch(fields.get(name, "-" if name == "name" else "")) is None:
            raise ValueError(f"{name}= must be 1 to 64 letters, digits, '.', '_' or '-'")
    return ApiKey(
        hash=digest,
        tenant=fields["tenant"],
        name=fields.get("name", ""),
        weight=_weight(fields.get("weight", "1")),
        cache_scope=_cache_scope(fields.get("cache_scope")),
        priority=_priority(fields.get("priority", "0")),
    )


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not (math.isfinite(weight) and weight > 0):
        raise ValueError("weight= must be a number above 0")
    return weight


def _priority(text: str) -> int:
    if _PRIORITY.fullmatch(text) is None:
        raise ValueError("priority= must be a whole number, of at most 6 digits")
    return int(text)


def _cache_scope(text: str | None) -> CacheScope | None:
    match text:
        case None | "tenant" | "shared":
            return text
        case _:
            raise ValueError("cache_scope= must be tenant or shared")
