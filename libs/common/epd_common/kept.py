"""What a PD worker's engine keeps of the beginnings of prompts, learned from what becomes of its blocks.

An engine's cache holds blocks of tokens, and tells which it stores and removes (vLLM: KV events). Who sends a
request knows no tokens, so what a worker tells others are beginnings, by the keys of
:mod:`epd_common.beginnings`: one is kept while the block is in which it ends. Blocks go from a prompt's end
to its beginning, so those before it are then there, too. No I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

MOST_KEPT = 2048
"""Beginnings of one worker, at most; the least recently used are told of no more."""

Told = Callable[[Sequence[str], Sequence[str]], None]
"""Is told the keys that are kept from now on, and those that are no more."""

Block = bytes | int
"""An engine's own name of a block, by all tokens up to its end."""


class BlockWatch:
    """Follows the blocks of one engine.

    Args:
        told: Of each change.
    """

    def __init__(self, told: Told, *, most: int = MOST_KEPT) -> None:
        self._told = told
        self._most = most
        self._blocks: dict[Block, int] = {}
        """How often each is stored: requests that ran at once may have made it twice."""
        self._ends: OrderedDict[str, Block] = OrderedDict()
        self._ending: dict[Block, set[str]] = {}

    @property
    def kept(self) -> list[str]:
        """All keys, the least recently used first."""
        return list(self._ends)

    def stored(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._blocks[block] = self._blocks.get(block, 0) + 1

    def removed(self, blocks: Iterable[Block]) -> None:
        gone: list[str] = []
        for block in blocks:
            left = self._blocks.get(block, 0) - 1
            if left > 0:
                self._blocks[block] = left
                continue
            self._blocks.pop(block, None)
            gone += self._ending.pop(block, ())
        for key in gone:
            del self._ends[key]
        if gone:
            self._told((), gone)

    def cleared(self) -> None:
        """All blocks were removed."""
        gone = self.kept
        self._blocks.clear()
        self._ends.clear()
        self._ending.clear()
        if gone:
            self._told((), gone)

    def prefilled(self, ends: Iterable[tuple[str, Block]]) -> None:
        """A prompt was computed, or found, with these beginnings, which end in these blocks.

        What ends in a block that is not stored is not kept: caching may be off, or another kind of cache
        names its blocks otherwise.
        """
        added: list[str] = []
        gone: list[str] = []
        for key, block in ends:
            if block not in self._blocks:
                continue
            if key in self._ends:
                self._forget(key)
            else:
                added.append(key)
            self._ends[key] = block
            self._ending.setdefault(block, set()).add(key)
        while len(self._ends) > self._most:
            key = next(iter(self._ends))
            self._forget(key)
            gone.append(key)
        if added or gone:
            self._told(added, gone)

    def _forget(self, key: str) -> None:
        block = self._ends.pop(key)
        keys = self._ending[block]
        keys.discard(key)
        if not keys:
            del self._ending[block]


class Kept:
    """The beginnings that a worker's engine keeps, and how that changed since the changes were last taken."""

    def __init__(self) -> None:
        self.changed: Callable[[], object] = lambda: None
        """Is called after each change."""
        self.keys: set[str] = set()
        self._added: set[str] = set()
        self._gone: set[str] = set()

    def note(self, added: Sequence[str], gone: Sequence[str]) -> None:
        """Keys are kept from now on, and others no more."""
        for key in added:
            self.keys.add(key)
            self._added.add(key)
            self._gone.discard(key)
        for key in gone:
            self.keys.discard(key)
            self._added.discard(key)
            self._gone.add(key)
        self.changed()

    def clear(self) -> None:
        self.note((), list(self.keys))

    def take(self) -> tuple[list[str], list[str]]:
        """What is new, and what is gone, since the last call."""
        added, gone = sorted(self._added), sorted(self._gone)
        self._added.clear()
        self._gone.clear()
        return added, gone
