"""What a simulated engine keeps of prompts that it has prefilled: blocks of tokens, as vLLM's prefix cache.

A block is known by all tokens up to its end, so equal blocks have equal beginnings. The least recently used
go first. That running sequences hold theirs is not simulated, nor are the tokens of answers kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import xxhash

from epd_common.kept import BlockWatch

BLOCK_TOKENS = 16
_TOKEN_BYTES = 4


def text_tokens(text: bytes, count: int) -> bytes:
    """So many tokens of a text that has no more: four bytes each, as there is no tokenizer."""
    return text.ljust(count * _TOKEN_BYTES, b"\0")


def item_tokens(key: str, count: int) -> bytes:
    """The tokens of an item, each alike."""
    return xxhash.xxh3_64_digest(key.encode())[:_TOKEN_BYTES] * count


def blocks_of(tokens: bytes) -> list[bytes]:
    """The names of a prompt's whole blocks."""
    size = BLOCK_TOKENS * _TOKEN_BYTES
    names = []
    name = b""
    for begin in range(0, len(tokens) - size + 1, size):
        name = xxhash.xxh3_128_digest(name + tokens[begin : begin + size])
        names.append(name)
    return names


class PrefixCache:
    """Blocks of prompts.

    Args:
        tokens: That it holds at most; 0: nothing is kept.
        watch: Is told of blocks that are stored and removed, as vLLM tells by its KV events.
    """

    def __init__(self, tokens: int, watch: BlockWatch | None = None) -> None:
        self._most = tokens // BLOCK_TOKENS
        self._watch = watch
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def held(self, blocks: Sequence[bytes]) -> int:
        """Tokens of a prompt's beginning that are held."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count * BLOCK_TOKENS

    def keep(self, blocks: Sequence[bytes]) -> None:
        """A prompt's blocks were computed or used."""
        # A beginning is used by more prompts than an end, and goes later.
        stored = [block for block in blocks if block not in self._blocks]
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        removed = []
        while len(self._blocks) > self._most:
            removed.append(self._blocks.popitem(last=False)[0])
        if self._watch is not None:
            self._watch.stored(stored)
            self._watch.removed(removed)
