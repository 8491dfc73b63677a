"""Receipts: what became of a request on the PD worker that answered it, with the last frame of its reply.

All times are seconds on one clock, the worker's, from the moment at which it took the job from its queue. So
whoever reads them needs no clock that agrees with the worker's: the job waited ``queued_s`` before that.
"""

from __future__ import annotations

from typing import Literal

from epd_common.protocol.base import Part

Rescue = Literal["", "ordered", "local"]
"""What it took to get an embedding: nothing out of the ordinary, another order, or an encode by the PD
worker itself."""


class ItemReceipt(Part, frozen=True, kw_only=True):
    """One media item of a request, as it came to the PD worker.

    ``queued_s``, ``media_s``, ``encode_s`` and ``publish_s`` are what its encoder said of it: waiting for a
    slot, looking it up and fetching the bytes, the engine's time with the wait for a place in its batch, and
    writing the embedding to the stores. All are 0 where it was there before. ``ready_s`` is when this worker
    knew of the embedding, ``pinned_s`` when it lay on its node for the engine, from ``store``. What did not
    come to pass is None.
    """

    key: str
    modality: str = "image"
    width: int = 0
    height: int = 0
    encoder: str = ""
    attempt: int = 0
    rescue: Rescue = ""
    queued_s: float = 0.0
    media_s: float = 0.0
    encode_s: float = 0.0
    publish_s: float = 0.0
    sized_s: float | None = None
    ready_s: float | None = None
    pinned_s: float | None = None
    store: str = ""
    rows: int = 0
    bytes: int = 0


class Receipt(Part, frozen=True, kw_only=True):
    """One attempt at a request.

    ``prepared_s``: the body was read and the embeddings were asked for; ``entered_s``: the engine got it;
    ``first_s``: the first piece of the answer; ``ended_s``: the frame that this comes with. ``prompt_tokens``
    are estimated where embeddings were not there yet; ``loaded_tokens`` of them were computed by a prefill
    worker. ``prefill`` is that one's receipt, which ended when the decode job was published; its ``first_s``
    is when the prompt was prefilled. ``resumed_tokens`` were told by an earlier attempt on another worker;
    ``restarts`` counts prompts that were made anew, as an item turned out to have another size.
    """

    worker: str
    node: str
    attempt: int
    queued_s: float
    prepared_s: float | None = None
    entered_s: float | None = None
    first_s: float | None = None
    ended_s: float = 0.0
    prompt_tokens: int = 0
    loaded_tokens: int = 0
    resumed_tokens: int = 0
    restarts: int = 0
    items: list[ItemReceipt] = []
    prefill: Receipt | None = None
