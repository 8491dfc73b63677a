"""Digests and keys (invariant I9): what names an embedding, and nothing shorter."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

_HEX64 = re.compile(r"[0-9a-f]{64}")


def digest(data: bytes | memoryview) -> str:
    """SHA-256 of the media's bytes as they came, in lower-case hex (64 characters)."""
    return hashlib.sha256(data).hexdigest()


def embedding_key(
    *,
    media_digest: str,
    fingerprint: str,
    modality: str = "image",
    processor_args: dict[str, Any] | None = None,
    scope: str = "",
) -> str:
    """The key of an embedding, 64 hex characters.

    SHA-256 over six lines: ``epd-key-1``, modality, media digest, model fingerprint, cache scope, and the
    processor arguments as JSON with sorted keys and no spaces (``{}`` for none). Any language can do that.
    """
    args = json.dumps(processor_args or {}, sort_keys=True, separators=(",", ":"))
    lines = ("epd-key-1", modality, media_digest, fingerprint, scope, args)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def is_key(text: str) -> bool:
    """Whether ``text`` has the form of a key or a digest. Keys become file names and subjects."""
    return _HEX64.fullmatch(text) is not None
