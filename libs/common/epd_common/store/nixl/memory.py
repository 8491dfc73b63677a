"""Memory that NIXL may read or write: where it lies, and of which kind it is."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Literal, Protocol, Self

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

    def read(self, offset: int, size: int) -> bytearray:
        """A copy of what lies there."""

    def close(self) -> None:
        """Give it back; nobody may read it any more."""


class HostRegion:
    """New memory of this process. It takes real memory as it is used, a huge page at a time where it can."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)
        self.span = Span(address_of(self._map), size)

    @classmethod
    def of(cls, size: int) -> Self:
        return cls(size)

    def write(self, offset: int, part: bytes | memoryview) -> None:
        view = memoryview(part).cast("B")
        self._view[offset : offset + view.nbytes] = view

    def read(self, offset: int, size: int) -> bytearray:
        return bytearray(self._view[offset : offset + size])

    def close(self) -> None:
        self._view.release()
        self._map.close()


def address_of(mapped: mmap.mmap) -> int:
    """Where a mapping lies; it must be kept open by whoever uses the address."""
    first = ctypes.c_char.from_buffer(mapped)
    try:
        return ctypes.addressof(first)
    finally:
        del first  # it would keep the mapping from being closed
