"""How a prepared body begins: a name for what stands up to the end of each message. No I/O.

Who makes a prompt of a body and who only sends it name its beginnings alike, without a tokenizer. A request
that goes on where another one ended has that one's whole prompt among its beginnings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import msgspec
import xxhash

from epd_common.costs import CHARACTERS_PER_TOKEN, rows_by_size
from epd_common.ingest.body import CONTENT_FIELDS
from epd_common.ingest.contents import PROMPT_FIELDS
from epd_common.ingest.parts import text_of
from epd_common.protocol import Item

MIN_TOKENS = 256
"""What is shorter is prefilled sooner than it is worth waiting for anybody in particular: about 12 ms on an
H100 with a model of 7B."""

FIRST, LAST = 2, 6
"""So many beginnings of a request count, the shortest and the longest: what conversations share, and what
the turns before the latest one were, or what it was in place of an answer that was tried again."""

_SHOWN_FIRST = (
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "cache_salt",
    "instructions",
)
"""Fields that change what a prompt begins with, or whose cache it may use."""

_encoder = msgspec.json.Encoder(order="deterministic")


@dataclass(frozen=True, slots=True)
class Beginning:
    """The beginning of a request up to the end of a message.

    Attributes:
        key: Its name, 16 hex characters. A clash of two sends a request to the wrong worker, no more.
        tokens: That it has, by estimate.
        share: Of the whole prompt, by the same estimate; 1 for the whole.
    """

    key: str
    tokens: int
    share: float


def beginnings_of(route: str, body: dict[str, Any], items: Sequence[Item]) -> list[Beginning]:
    """The beginnings that count, the longest last; those below ``MIN_TOKENS`` are left out.

    Args:
        items: Those that the body's ``media_ref`` parts point at. They count by their keys, by which engines
            know them.
    """
    prompt = body.get(PROMPT_FIELDS[route])
    entries = [prompt] if isinstance(prompt, str) else prompt
    if route not in CONTENT_FIELDS or not isinstance(entries, list) or not entries:
        return []
    first = _encoder.encode([body.get(name) for name in _SHOWN_FIRST])
    digest = xxhash.xxh3_64(first)
    characters, rows = len(first), 0
    found: list[tuple[str, int]] = []
    for entry in entries:
        shown = dict(entry) if isinstance(entry, dict) else {CONTENT_FIELDS[route][0]: entry}
        for name in CONTENT_FIELDS[route]:
            parts = shown.get(name)
            if isinstance(parts, list):
                shown[name] = [_named(part, items) for part in parts]
            for part in parts if isinstance(parts, list) else (parts,):
                characters += len(text_of(part))
                rows += _rows(part, items)
        digest.update(_encoder.encode(shown))
        found.append((digest.hexdigest(), characters // CHARACTERS_PER_TOKEN + rows))
    total = max(found[-1][1], 1)
    chosen = found if len(found) <= FIRST + LAST else found[:FIRST] + found[-LAST:]
    return [
        Beginning(key, tokens, tokens / total) for key, tokens in chosen if tokens >= MIN_TOKENS
    ]


def _named(part: object, items: Sequence[Item]) -> object:
    """A part, or the key of the item that it shows."""
    return items[part["item"]].key if _is_reference(part) else part


def _rows(part: object, items: Sequence[Item]) -> int:
    return rows_by_size(items[part["item"]]) if _is_reference(part) else 0


def _is_reference(part: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(part, dict) and part.get("type") == "media_ref"
