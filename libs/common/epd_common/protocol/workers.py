"""The registry: one record a worker in the KV bucket ``epd_workers``."""

from __future__ import annotations

from typing import Literal

from epd_common.protocol.base import Message

WorkerState = Literal["starting", "ready", "draining", "failed"]
Role = Literal["gateway", "encoder", "pd", "client"]
Encodes = Literal["no", "queue", "rescue"]
"""Whether a worker turns media into embeddings: not at all, as jobs from the queue, or only where those who
take the jobs fail."""


class WorkerRecord(Message, tag="worker", frozen=True, kw_only=True):
    """Who a worker is and how it does; written at every heartbeat.

    ``beat`` counts heartbeats of this process: a reader that sees it stand still for
    ``ttl_s`` by its own clock holds the worker for dead, so that clocks need not agree.
    ``encodes`` is ``queue`` for who takes encode jobs, ``rescue`` for a PD worker that encodes an item itself
    where they fail, else ``no``.
    A ``client`` is a process of the client library; its record says only that it lives.
    ``special_tokens`` are the model's reserved tokens, which no message text may hold.
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
    slots: int = 0
    busy: int = 0
    pid: int = 0
    phase: str = ""
    error: str = ""
    max_model_len: int = 0
    special_tokens: list[str] = []
    versions: dict[str, str] = {}
