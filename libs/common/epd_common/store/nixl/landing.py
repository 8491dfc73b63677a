"""Where embeddings of other nodes land: registered files of the arena, published in place.

A new file's pages take longer to make than the reading itself. So after each file that was used one of its
size is made ready beside the work, up to a bound. Where none is ready what is read comes through a window,
and is written into a new file from there: mapping the file would take longer than writing it.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_common.errors import EpdError
from epd_common.store.arena import Arena
from epd_common.store.embedding import EmbeddingHeader
from epd_common.store.nixl.agent import Agent
from epd_common.store.nixl.errors import NotReadError
from epd_common.store.nixl.memory import Span
from epd_common.store.room import free_bytes, whole_file

logger = logging.getLogger(__name__)

ROUND_BYTES = 64 * 1024
"""Files have a multiple of this, so that one fits embeddings of nearly the same size."""

SPARE_SHARE = 8
"""A file is made ready only where its file system has so many times its size free."""

QUARANTINE_S = 10.0
"""What a slow peer was to write into is mapped for so long after the connection to it was dropped."""

WINDOW_BYTES = 8 << 20

_POPULATE_WRITE = 23  # madvise's MADV_POPULATE_WRITE, of Linux 5.14; Python has no name for it
_STEP_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """Memory that NIXL may write: a file's that is ready, or a window through which others are filled."""

    path: Path | None
    span: Span
    view: memoryview


@dataclass(slots=True, eq=False)
class Place:
    """Where one embedding lands: in a file that is ready, or through a window in a new one."""

    path: Path
    mapped: Mapped
    descriptor: int | None = None

    def target(self, start: int, size: int) -> Span:
        """Where the bytes from ``start`` on are to be read to."""
        return self.mapped.span.part(start if self.descriptor is None else 0, size)

    def took(self, start: int, size: int) -> memoryview:
        """They are there; for a look at them before the next ones come."""
        if self.descriptor is None:
            return self.mapped.view[start : start + size]
        part = self.mapped.view[:size]
        written = 0
        while written < size:
            written += os.pwrite(self.descriptor, part[written:], start + written)
        return part

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Landing:
    """The files of one worker; they go with it. May be used from any thread.

    Args:
        ready_bytes: Of files that are made ready, together.
    """

    def __init__(self, arena: Arena, agent: Agent, *, ready_bytes: int) -> None:
        self._arena = arena
        self._agent = agent
        self._bound = ready_bytes
        self._lock = threading.Lock()
        self._ready: list[Mapped] = []  # the one used longest ago first
        self._windows: list[Mapped] = []
        self._numbers = itertools.count(1)
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="nixl-landing")
        self._quarantine: list[tuple[float, Mapped]] = []
        self._closed = False

    @property
    def ready_bytes(self) -> int:
        with self._lock:
            return sum(file.span.size for file in self._ready)

    def take(self, size: int, *, key: str) -> Place:
        """A place for so many bytes.

        Raises:
            StoreFullError: there is no room for a new file.
            NotReadError: no memory could be registered.
        """
        with self._lock:
            fitting = [
                file for file in self._ready if size <= file.span.size <= 2 * size + ROUND_BYTES
            ]
            if fitting:
                best = min(fitting, key=lambda file: file.span.size)
                self._ready.remove(best)
                assert best.path is not None
                return Place(best.path, best)
            window = self._windows.pop() if self._windows else None
        if window is None:
            address = _map(-1, WINDOW_BYTES)
            _libc.madvise(address, WINDOW_BYTES, mmap.MADV_HUGEPAGE)
            window = self._registered(None, WINDOW_BYTES, address)
        path = self._new_path()
        try:
            with whole_file(path, size, key=key) as file:
                return Place(path, window, os.dup(file.fileno()))
        except BaseException:
            with self._lock:
                self._windows.append(window)
            raise

    def publish(self, place: Place, header: EmbeddingHeader) -> None:
        """What landed is whole: make it the arena's. The place is used up."""
        try:
            os.truncate(place.path, header.file_bytes)
            self._arena.adopt(place.path, header)
        finally:
            self._use_up(place)
            self._later(self._prepare, header.file_bytes)

    def give_back(self, place: Place) -> None:
        """Nothing landed; the next one may."""
        if place.descriptor is not None:
            self._use_up(place)
            return
        with self._lock:
            self._ready.append(place.mapped)
        self._later(self._keep_bound)

    def quarantine(self, place: Place) -> None:
        """Something may still come into it: use it for nothing."""
        place.close()
        place.path.unlink(missing_ok=True)
        with self._lock:
            self._quarantine.append((time.monotonic() + QUARANTINE_S, place.mapped))

    def close(self) -> None:
        """Give all of it back, also what is in quarantine: there are no connections any more."""
        with self._lock:
            self._closed = True
            left = [*self._ready, *self._windows, *(each for _, each in self._quarantine)]
            self._ready, self._windows, self._quarantine = [], [], []
        self._beside.shutdown()
        for each in left:
            self._end(each)

    def _use_up(self, place: Place) -> None:
        through = place.descriptor is not None
        place.close()
        place.path.unlink(missing_ok=True)
        if not through:
            self._later(self._end, place.mapped)
            return
        with self._lock:
            if not self._closed:
                self._windows.append(place.mapped)
                return
        self._end(place.mapped)

    # -- beside the work -------------------------------------------------------------------------

    def _later(self, step: Callable[..., None], *args: Any) -> None:
        with self._lock:
            if not self._closed:
                self._beside.submit(step, *args)
                return
        if step == self._end:
            self._end(*args)

    def _prepare(self, size: int) -> None:
        """Make a file of this size ready, if there is room, and end quarantines that are over."""
        now = time.monotonic()
        with self._lock:
            over = [each for until, each in self._quarantine if until <= now]
            self._quarantine = [each for each in self._quarantine if each[0] > now]
        for each in over:
            self._end(each)
        size = -(-size // ROUND_BYTES) * ROUND_BYTES
        if size > self._bound or free_bytes(self._arena.root) < SPARE_SHARE * size:
            return
        try:
            made = self._make(size)
        except (EpdError, OSError) as error:
            logger.warning("no file was made ready for embeddings: %s", error)
            return
        with self._lock:
            if not self._closed:
                self._ready.append(made)
        if self._closed:
            self._end(made)
        self._keep_bound()

    def _keep_bound(self) -> None:
        too_many = []
        with self._lock:
            while sum(file.span.size for file in self._ready) > self._bound:
                too_many.append(self._ready.pop(0))
        for file in too_many:
            self._end(file)

    # -- memory ----------------------------------------------------------------------------------

    def _new_path(self) -> Path:
        folder = self._arena.landing
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{self._agent.name}-{next(self._numbers)}"

    def _make(self, size: int) -> Mapped:
        path = self._new_path()
        with whole_file(path, size, key=""):
            descriptor = os.open(path, os.O_RDWR)
            try:
                address = _map(descriptor, size)
            finally:
                os.close(descriptor)
            _touch(address, size)
            made = self._registered(path, size, address)
        return made

    def _registered(self, path: Path | None, size: int, address: int) -> Mapped:
        span = Span(address, size)
        try:
            self._agent.register(span)
        except BaseException:
            _unmap(span)
            raise
        memory = (ctypes.c_char * size).from_address(address)
        return Mapped(path, span, memoryview(memory).cast("B"))

    def _end(self, mapped: Mapped) -> None:
        self._agent.deregister(mapped.span)
        mapped.view.release()
        _unmap(mapped.span)
        if mapped.path is not None:
            mapped.path.unlink(missing_ok=True)


_libc: Any = ctypes.CDLL(None, use_errno=True)  # its calls leave the interpreter's lock to others
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _map(descriptor: int, size: int) -> int:
    """A file's pages; new ones of no file for -1. Python's own mmap keeps the interpreter while it unmaps."""
    kind = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address: int | None = _libc.mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, descriptor, 0
    )
    if address is None or address == ctypes.c_void_p(-1).value:
        reason = os.strerror(ctypes.get_errno())
        raise NotReadError("memory", f"no {size} bytes could be mapped: {reason}")
    return address


def _unmap(span: Span) -> None:
    _libc.munmap(span.address, span.size)


def _touch(address: int, size: int) -> None:
    """Have pages mapped. Older kernels refuse, and map them as they are written."""
    for start in range(0, size, _STEP_BYTES):
        _libc.madvise(address + start, min(_STEP_BYTES, size - start), _POPULATE_WRITE)
