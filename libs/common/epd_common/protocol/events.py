"""Events: what an encoder tells everybody about one embedding, on ``epd.v1.ready.<key>``."""

from __future__ import annotations

from typing import Any, Literal

from epd_common.protocol.base import Message, Part

EmbeddingState = Literal["sized", "ready", "failed"]


class Locator(Part, frozen=True, kw_only=True):
    """One place an embedding can be read from.

    ``store`` is ``arena``, ``nixl`` or ``redis``; ``node`` tells whose arena or memory it is (empty for a
    store that all reach). The rest is for ``nixl``: ``bytes`` bytes, header included, from ``offset`` on in
    the region of ``agent``, whose record in Valkey (``epd:v1:nixl:<agent>``) holds what NIXL needs of it;
    ``generation`` names the slot in notices to it; ``compat`` must equal the reader's own.
    """

    store: str
    node: str = ""
    agent: str = ""
    offset: int = 0
    bytes: int = 0
    generation: int = 0
    compat: str = ""


class EmbeddingEvent(Message, tag="ready", frozen=True, kw_only=True):
    """State of one embedding.

    ``metadata`` holds what a PD worker needs in place of pixels, e.g. ``{"image_grid_thw": [1, 8, 8]}``.
    ``rows`` x ``width`` values of ``dtype`` make ``bytes`` payload bytes, whose xxh3-128 is ``checksum``.
    ``queue_s``, ``media_s``, ``encode_s`` and ``publish_s`` are the seconds that it took, one after another:
    in the queue, to fetch and check the bytes, in the engine, and into the stores; 0 where it was there
    before.
    A ``failed`` event has ``status`` (as in HTTP), ``code`` and ``reason``.
    """

    key: str
    epoch: int
    state: EmbeddingState
    fingerprint: str = ""
    metadata: dict[str, Any] = {}
    rows: int = 0
    width: int = 0
    dtype: str = ""
    bytes: int = 0
    checksum: str = ""
    locators: list[Locator] = []
    encoder: str = ""
    attempt: int = 1
    queue_s: float = 0.0
    media_s: float = 0.0
    encode_s: float = 0.0
    publish_s: float = 0.0
    status: int = 0
    code: str = ""
    reason: str = ""
