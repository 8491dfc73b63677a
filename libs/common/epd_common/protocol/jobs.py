"""Jobs: from a client or the gateway to the workers, through JetStream work queues."""

from __future__ import annotations

from typing import Any, Literal

from epd_common.protocol.base import Message, Part
from epd_common.protocol.receipts import Receipt

Modality = Literal["image", "video", "audio"]

MAX_INLINE_BYTES = 512 * 1024
"""Inline media of one direct job, in bytes, all items together (invariant I8)."""


class Media(Part, frozen=True, kw_only=True):
    """Where the bytes of a media part are: a reference to the media store, or inline.

    Exactly one of ``ref`` and ``inline`` is set. ``ref`` is the id that the media store gave.
    """

    ref: str | None = None
    inline: bytes | None = None
    content_type: str = ""


class Item(Part, frozen=True, kw_only=True):
    """One distinct media item of a request.

    A *raw* item carries only ``modality`` and inline ``media``; whoever ingests it fills in the rest.
    ``key`` names its embedding (see ``keys.embedding_key``), ``digest`` is the SHA-256 of its bytes in
    hex, ``epoch`` is that of the encode job which was published for it or found under way.
    """

    modality: Modality = "image"
    media: Media
    key: str = ""
    digest: str = ""
    epoch: int = 0
    width: int = 0
    height: int = 0
    processor_args: dict[str, Any] = {}


class EncodeJob(Message, tag="encode", frozen=True, kw_only=True):
    """Encode one item. Subject ``epd.v1.encode.<model>.<lane>``, stream ``EPD_ENCODE``.

    ``key`` must be that of the media's bytes, ``modality``, ``fingerprint``, ``processor_args`` and
    ``scope``: the encoder computes it again. ``deadline`` is in seconds since the Unix epoch, as jobs
    cross machines; 0 is none.
    """

    key: str
    epoch: int
    model: str
    fingerprint: str
    modality: Modality = "image"
    media: Media
    processor_args: dict[str, Any] = {}
    scope: str = ""
    deadline: float = 0.0
    request_id: str = ""
    traceparent: str = ""


class Handover(Part, frozen=True, kw_only=True):
    """What a prefill worker leaves to a decode worker: where the keys and values of the prompt are.

    ``params`` are what the engine's KV connector said of them, for the connector of another engine of the
    same kind. They are kept for ``lease_s`` from when the job with this was published. ``metadata`` are those
    of each item of the job, in their order, so that nobody needs the embeddings to make the same prompt.
    ``attempt`` is the prefill worker's; ``receipt`` is its word on what it did.
    """

    worker: str
    attempt: int
    lease_s: float
    params: dict[str, Any]
    metadata: list[dict[str, Any]] = []
    receipt: Receipt | None = None


class GenerateJob(Message, tag="generate", frozen=True, kw_only=True):
    """Answer one request. Subject ``epd.v1.generate.<model>.<lane>.<place>``, stream ``EPD_GENERATE``.

    ``body`` is the OpenAI body as JSON bytes in which every media part is
    ``{"type": "media_ref", "item": N}``, N being a place in ``items``. A body too large for a message
    lies in the media store under ``body_ref``. Reply frames go to ``inbox``. ``requester`` is the key of
    the sender's record in the registry, if it has one: the request ends when its heartbeat is missing.

    A *decode job* is one with a ``handover``, at the place ``decode``. Prefill workers alone make them.
    """

    request_id: str
    model: str
    route: str = "/v1/chat/completions"
    body: bytes = b""
    body_ref: str = ""
    items: list[Item] = []
    inbox: str = ""
    deadline: float = 0.0
    priority: int = 0
    scope: str = ""
    traceparent: str = ""
    requester: str = ""
    handover: Handover | None = None
