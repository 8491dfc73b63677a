"""Where embeddings of other nodes land: registered files of the arena, published in place.

A new file's pages take longer to make than the reading itself. So after each file that was used one of its
size is made ready beside the work, up to a bound.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_common.errors import EpdError
from epd_common.store.arena import Arena
from epd_common.store.embedding import EmbeddingHeader
from epd_common.store.nixl.agent import Agent
from epd_common.store.nixl.memory import Span
from epd_common.store.room import free_bytes, whole_file

logger = logging.getLogger(__name__)

ROUND_BYTES = 64 * 1024
"""Files have a multiple of this, so that one fits embeddings of nearly the same size."""

SPARE_SHARE = 8
"""A file is made ready only where its file system has so many times its size free."""

QUARANTINE_S = 10.0
"""What a slow peer was to write into is mapped for so long after the connection to it was dropped."""

_POPULATE_WRITE = 23  # madvise's MADV_POPULATE_WRITE, of Linux 5.14; Python has no name for it
_STEP_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A file that is mapped and registered."""

    path: Path
    span: Span
    view: memoryview

    @property
    def size(self) -> int:
        return self.span.size


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
        self._ready: list[Place] = []  # the one used longest ago first
        self._numbers = itertools.count(1)
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="nixl-landing")
        self._quarantine: list[tuple[float, Place]] = []
        self._closed = False

    @property
    def ready_bytes(self) -> int:
        with self._lock:
            return sum(place.size for place in self._ready)

    def take(self, size: int, *, key: str) -> Place:
        """A place for so many bytes: one that is ready, else a new one.

        Raises:
            StoreFullError: there is no room for a new one.
        """
        with self._lock:
            fitting = [
                place for place in self._ready if size <= place.size <= 2 * size + ROUND_BYTES
            ]
            if fitting:
                best = min(fitting, key=lambda place: place.size)
                self._ready.remove(best)
                return best
        return self._make(size, key=key)

    def publish(self, place: Place, header: EmbeddingHeader) -> None:
        """What landed is whole: make it the arena's. The place is used up."""
        try:
            os.truncate(place.path, header.file_bytes)
            self._arena.adopt(place.path, header)
        finally:
            place.path.unlink(missing_ok=True)
            self._later(self._end, place)
            self._later(self._prepare, place.size)

    def give_back(self, place: Place) -> None:
        """Nothing landed; the next one may."""
        with self._lock:
            self._ready.append(place)
        self._later(self._keep_bound)

    def quarantine(self, place: Place) -> None:
        """Something may still come into it: use it for nothing."""
        place.path.unlink(missing_ok=True)
        with self._lock:
            self._quarantine.append((time.monotonic() + QUARANTINE_S, place))

    def close(self) -> None:
        """Give all of it back, also what is in quarantine: there are no connections any more."""
        with self._lock:
            self._closed = True
            left = self._ready + [place for _, place in self._quarantine]
            self._ready, self._quarantine = [], []
        self._beside.shutdown(cancel_futures=True)
        for place in left:
            self._end(place)

    # -- beside the work -------------------------------------------------------------------------

    def _later(self, step: Any, *args: Any) -> None:
        with self._lock:
            if not self._closed:
                self._beside.submit(step, *args)
                return
        if step == self._end:
            self._end(*args)

    def _prepare(self, size: int) -> None:
        """Make one of this size ready, if there is room, and end quarantines that are over."""
        now = time.monotonic()
        with self._lock:
            over = [place for until, place in self._quarantine if until <= now]
            self._quarantine = [each for each in self._quarantine if each[0] > now]
        for place in over:
            self._end(place)
        if size > self._bound or free_bytes(self._arena.root) < SPARE_SHARE * size:
            return
        try:
            place = self._make(size, key="")
        except (EpdError, OSError) as error:
            logger.warning("no place was made ready for embeddings: %s", error)
            return
        _touch(place.span)
        with self._lock:
            if not self._closed:
                self._ready.append(place)
                place = None  # type: ignore[assignment]
        if place is not None:
            self._end(place)
        self._keep_bound()

    def _keep_bound(self) -> None:
        too_many = []
        with self._lock:
            while sum(place.size for place in self._ready) > self._bound:
                too_many.append(self._ready.pop(0))
        for place in too_many:
            self._end(place)

    # -- files -----------------------------------------------------------------------------------

    def _make(self, size: int, *, key: str) -> Place:
        size = -(-size // ROUND_BYTES) * ROUND_BYTES
        folder = self._arena.landing
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{next(self._numbers)}"
        with whole_file(path, size, key=key) as file:
            # Not Python's mmap: it holds the interpreter's lock while it unmaps.
            descriptor = os.open(path, os.O_RDWR)
            try:
                address = _map(descriptor, size)
            finally:
                os.close(descriptor)
            del file
        span = Span(address, size)
        try:
            self._agent.register(span)
        except BaseException:
            _unmap(span)
            path.unlink(missing_ok=True)
            raise
        memory = (ctypes.c_char * size).from_address(address)
        return Place(path, span, memoryview(memory).cast("B"))

    def _end(self, place: Place) -> None:
        self._agent.deregister(place.span)
        place.view.release()
        _unmap(place.span)
        place.path.unlink(missing_ok=True)


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
    address: int | None = _libc.mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0
    )
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def _unmap(span: Span) -> None:
    _libc.munmap(span.address, span.size)


def _touch(span: Span) -> None:
    """Have its pages mapped. Older kernels refuse, and map them as they are written."""
    for start in range(0, span.size, _STEP_BYTES):
        step = min(_STEP_BYTES, span.size - start)
        _libc.madvise(span.address + start, step, _POPULATE_WRITE)
