"""Fills an arena on a small tmpfs of its own; run by ``test_arena_room.py`` in a mount namespace.

Arguments: who writes (``arena``, ``sim`` or ``vllm``), and an empty folder on that tmpfs, 8 MiB large. Prints
what became of it as one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from epd_common.store import Arena, Embedding, EmbeddingHeader
from epd_common.store.embedding import payload_checksum
from epd_common.store.room import ArenaFullError

MIB = 1 << 20
ROWS, WIDTH = 512, 512
"""Half a MiB each."""

Write = Callable[[Arena, str], None]


def _header(key: str, payload: bytes = b"") -> EmbeddingHeader:
    return EmbeddingHeader(
        key=key,
        rows=ROWS,
        width=WIDTH,
        dtype="bfloat16",
        fingerprint="f" * 64,
        checksum=payload_checksum(payload) if payload else "",
    )


def by_arena(arena: Arena, key: str) -> None:
    payload = secrets.token_bytes(2 * ROWS * WIDTH)
    asyncio.run(arena.put(Embedding(_header(key, payload), memoryview(payload))))


def by_sim(arena: Arena, key: str) -> None:
    from epd_sim.embedding import signature, write_embedding

    path, _ = write_embedding(arena.staging, _header(key), signature(key.encode()))
    arena.adopt(path, _header(key))


def by_vllm(arena: Arena, key: str) -> None:
    import torch

    from epd_vllm.embedding_io import seal, write_staged

    write_staged(arena.staging, key, torch.ones(ROWS, WIDTH, dtype=torch.bfloat16))
    staged = arena.staging / key
    arena.adopt(staged, seal(staged, key=key, fingerprint="f" * 64, metadata={}))


def main(write: Write, folder: Path) -> dict[str, Any]:
    arena = Arena(folder / "arena", quota_bytes=1 << 30, worker="w")
    arena.open()
    facts: dict[str, Any] = {"quota_bytes": arena.quota_bytes}
    other = folder / "another's"  # so that the quota alone does not keep the room free
    other.write_bytes(bytes(5 * MIB))
    keys = [secrets.token_hex(32) for _ in range(20)]
    for order, key in enumerate(keys):
        write(arena, key)
        os.utime(arena.root / "data" / key, ns=(order, order))
    kept = sorted(os.listdir(arena.root / "data"), key=keys.index)
    facts["kept"] = len(kept)
    facts["newest_kept"] = kept == keys[-len(kept) :]
    for key in kept:
        arena.pin(key)
    try:
        write(arena, secrets.token_hex(32))
        facts["all_pinned"] = "taken"
    except ArenaFullError as error:
        facts["all_pinned"] = "full"
        facts["message"] = error.message
    facts["kept_though_full"] = len(os.listdir(arena.root / "data"))
    facts["unfinished"] = os.listdir(arena.staging)
    arena.unpin(kept[0])
    write(arena, secrets.token_hex(32))
    facts["kept_at_last"] = len(os.listdir(arena.root / "data"))
    other.unlink()
    for _ in range(5):
        write(arena, secrets.token_hex(32))
    facts["kept_with_room"] = len(os.listdir(arena.root / "data"))
    arena.close()
    return facts


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    writers = {"arena": by_arena, "sim": by_sim, "vllm": by_vllm}
    print(json.dumps(main(writers[sys.argv[1]], Path(sys.argv[2]))))
