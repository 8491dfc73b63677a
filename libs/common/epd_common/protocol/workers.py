"""The registry: one record a worker in the KV bucket ``epd_workers``."""

from __future__ import annotations

from typing import Literal

from epd_common.protocol.base import Message

WorkerState = Literal["starting", "ready", "draining", "failed"]
Role = Literal["gateway", "encoder", "pd", "client"]
Encodes = Literal["no", "queue", "rescue"]
"""Whether a worker turns media into embeddings: not at all, as jobs from the queue, or only where those who
take the jobs fail."""


PdRole = Literal["pd", "prefill", "decode"]
"""What a PD worker does of a request: all; the prompt, or all of a short one; what comes behind it."""


class WorkerRecord(Message, tag="worker", frozen=True, kw_only=True):
    """Who a worker is and how it does; written at every heartbeat.

    ``beat`` counts heartbeats of this process: a reader that sees it stand still for
    ``ttl_s`` by its own clock holds the worker for dead, so that clocks need not agree.
    ``encodes`` is ``queue`` for who takes encode jobs, ``rescue`` for a PD worker that encodes an item itself
    where they fail, else ``no``.
    ``arena_used_bytes`` is of its node's arena, pins of what was evicted left out.
    ``pd_role`` is of PD workers alone.
    A ``client`` is a process of the client library; its record says only that it lives.
    ``special_tokens`` are the model's reserved tokens, which no message text may hold;
    ``special_token_ids`` are their ids in the same order; no prompt of ids may hold those of media.
    ``max_item_rows`` is what the engine's encoder cache holds, so no item may have more; 0: not known.
    """

    role: Role
    worker: str
    node: str
    state: WorkerState
    beat: int
    ttl_s: float = 6.0
    model: str = ""
    fingerprint: str = ""
    modalities: list[str] = []
    encodes: Encodes = "no"
    pd_role: PdRole = "pd"
    slots: int = 0
    busy: int = 0
    arena_used_bytes: int = 0
    arena_quota_bytes: int = 0
    pid: int = 0
    phase: str = ""
    error: str = ""
    max_model_len: int = 0
    max_item_rows: int = 0
    special_tokens: list[str] = []
    special_token_ids: list[int] = []
    versions: dict[str, str] = {}
