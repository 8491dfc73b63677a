"""Rendezvous hashing: who is nearest to a key, so that all who ask agree without talking. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def ranked(key: str, names: Iterable[str]) -> list[str]:
    """The names, the nearest to the key first. One that joins or leaves moves no other against the rest."""

    def nearness(name: str) -> bytes:
        return xxhash.xxh3_64_digest(f"{key}\n{name}".encode())

    return sorted(names, key=nearness, reverse=True)
