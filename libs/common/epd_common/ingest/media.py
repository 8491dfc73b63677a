"""What ingest needs from outside: where media come from, and where they go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from epd_common.store.media import StoredFile


@dataclass(frozen=True, slots=True)
class FetchedMedia:
    """The bytes behind a URL, and the type that the server claims."""

    data: bytes
    content_type: str


class Fetch(Protocol):
    """Fetches ``http(s):`` URLs."""

    async def __call__(self, url: str, place: str, *, owner: str = "") -> FetchedMedia:
        """Fetch one for a tenant (``owner``); ``place`` is for errors."""
        ...


class MediaStore(Protocol):
    """Holds media bytes until encoders have read them."""

    async def put(self, data: bytes, *, digest: str, content_type: str, owner: str) -> str:
        """Store the bytes, which may be there already, and return their reference: the digest.

        With another reference a client could give one picture's bytes the key of another.

        Args:
            owner: The tenant in whose quota they are, where tenants have one.
        """
        ...


class FileLookup(Protocol):
    """Finds files that clients uploaded."""

    async def lookup(self, file_id: str, scope: str) -> StoredFile | None:
        """The file with this id, if it is there and belongs to ``scope``."""
        ...
