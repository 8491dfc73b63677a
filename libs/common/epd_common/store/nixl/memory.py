"""Memory that NIXL may read or write: where it lies, and of which kind it is."""

from __future__ import annotations

import importlib
import mmap
from dataclasses import dataclass
from typing import Any, Literal, Protocol

MemoryKind = Literal["DRAM", "VRAM"]
"""NIXL's names; VRAM is a GPU's."""


@dataclass(frozen=True, slots=True)
class Span:
    """Some bytes in a process's memory, or on its GPU number ``device``."""

    address: int
    size: int
    kind: MemoryKind = "DRAM"
    device: int = 0

    def part(self, offset: int, size: int) -> Span:
        """Of these bytes; the caller has seen that they are inside."""
        return Span(self.address + offset, size, self.kind, self.device)


class Region(Protocol):
    """A region in which embeddings are kept; a store for a GPU's memory brings its own."""

    @property
    def span(self) -> Span: ...

    def write(self, offset: int, part: bytes | memoryview) -> None:
        """Copy bytes into it."""

    def read(self, offset: int, size: int) -> memoryview:
        """A copy of what lies there."""

    def close(self) -> None:
        """Give it back; nobody may read it any more."""


class HostRegion:
    """New memory of this process. It takes real memory as it is used, a huge page at a time where it can."""

    def __init__(self, size: int) -> None:
        # It comes with NIXL. Its copies leave the interpreter to other threads, those of memoryviews do not.
        self._numpy: Any = importlib.import_module("numpy")
        self._map = mmap.mmap(-1, size)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: Any = self._numpy.frombuffer(self._map, self._numpy.uint8)
        self.span = Span(int(self._bytes.ctypes.data), size)

    def write(self, offset: int, part: bytes | memoryview) -> None:
        given = self._numpy.frombuffer(part, self._numpy.uint8)
        self._numpy.copyto(self._bytes[offset : offset + given.nbytes], given)

    def read(self, offset: int, size: int) -> memoryview:
        return memoryview(self._bytes[offset : offset + size].copy())

    def close(self) -> None:
        del self._bytes  # or the mapping stays
        self._map.close()
