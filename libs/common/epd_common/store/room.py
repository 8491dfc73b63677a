"""Room in an arena: its quota, and the file system below it, which may be smaller or have other users.

Whoever writes into an arena's staging folder does it by :func:`whole_file`, in the service's process or in
an engine's: a file that did not become whole is never left, and a full file system loses its least recently
used embeddings rather than keep itself full.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from epd_common.errors import EpdError, UnavailableError
from epd_common.store.base import StoreFullError

logger = logging.getLogger(__name__)

QUOTA_SHARE = 7 / 8
"""Of its file system's size an arena's quota is this at most: what is being written needs room beside it."""

SMALLEST_SHARE = 1 / 4
"""Of ``EPD_ARENA_BYTES``: a worker that gets less than this does not start, as somebody meant another folder,
or forgot to give it room (a container's ``/dev/shm`` has 64 MB)."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class ArenaTooSmallError(EpdError):
    """The file system of an arena has far less room than the arena shall have."""

    default_code = "arena_too_small"


class ArenaFullError(StoreFullError, UnavailableError):
    """This node's arena is full now; that of another node may not be, so its worker steps back."""


@dataclass(frozen=True, slots=True)
class _Evictable:
    """What is published and not pinned: its memory is free once its name is gone."""

    used_ns: int
    size_bytes: int
    path: str

    def evict(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """One publisher of a node at a time, so that two do not both use the same room."""
    with open(root / "lock", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def entries(data: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Path and status of each published file."""
    with os.scandir(data) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                if entry.is_file(follow_symlinks=False):
                    yield entry.path, entry.stat(follow_symlinks=False)


def quota_that_fits(root: Path, quota_bytes: int) -> int:
    """The quota, or what its file system has room for: all workers of a node come to the same figure.

    What is there now and belongs to nobody here is only warned of, as it may go.
    """
    size_bytes, free_bytes = _file_system(root)
    fits_bytes = quota_bytes
    if size_bytes * QUOTA_SHARE < quota_bytes:
        fits_bytes = int(size_bytes * QUOTA_SHARE)
        logger.warning(
            "EPD_ARENA_BYTES=%d is more than the file system of %s has room for (%d bytes in all): the arena "
            "holds %d bytes at most; give its tmpfs more room (Docker: --shm-size, or a volume of its own)",
            quota_bytes,
            root,
            size_bytes,
            fits_bytes,
        )
    ours_bytes = sum(stat.st_size for _, stat in entries(root / "data"))
    if free_bytes + ours_bytes < fits_bytes:
        logger.warning(
            "the file system of %s has %d bytes free and %d in the arena, of %d that the arena may hold: "
            "others fill it, so embeddings will be evicted early, and refused once all are in use",
            root,
            free_bytes,
            ours_bytes,
            fits_bytes,
        )
    return fits_bytes


def check_size(root: Path, quota_bytes: int) -> None:
    """See that the file system has room for a good part of what the arena may hold.

    Raises:
        ArenaTooSmallError: it has not, whoever else uses it.
    """
    size_bytes, _ = _file_system(root)
    if size_bytes * QUOTA_SHARE < quota_bytes * SMALLEST_SHARE:
        raise ArenaTooSmallError(
            f"the file system of the arena {root} has {size_bytes / (1 << 20):.0f} MiB, and EPD_ARENA_BYTES "
            f"asks for {quota_bytes / (1 << 20):.0f}: give its tmpfs more room (Docker: shm_size, "
            "--shm-size; the compose file: EPD_ARENA_TMPFS_BYTES), or lower EPD_ARENA_BYTES"
        )


def keep_quota(root: Path, needed_bytes: int, quota_bytes: int) -> int:
    """Evict unpinned embeddings, least recently used first, until ``needed_bytes`` fit; how many that were.
    Under the lock.

    Raises:
        ArenaFullError: too much of the quota is pinned now.
        StoreFullError: so much never fits.
    """
    if needed_bytes > quota_bytes:
        raise StoreFullError(
            f"an embedding of {needed_bytes} bytes is more than the arena's {quota_bytes} bytes; raise "
            "EPD_ARENA_BYTES"
        )
    free, pinned_bytes = _published(root)
    used_bytes = pinned_bytes + sum(each.size_bytes for each in free)
    if pinned_bytes + needed_bytes > quota_bytes:
        raise ArenaFullError(
            f"the arena holds {pinned_bytes} pinned bytes of {quota_bytes}; "
            f"{needed_bytes} more do not fit; raise EPD_ARENA_BYTES",
        )
    for evicted, each in enumerate(free):
        if used_bytes + needed_bytes <= quota_bytes:
            return evicted
        each.evict()
        used_bytes -= each.size_bytes
    return len(free)


@contextlib.contextmanager
def whole_file(path: Path, size_bytes: int, *, key: str) -> Iterator[BinaryIO]:
    """A new file of a worker's staging folder (``<arena>/staging/<worker>/<file>``) with room for so many
    bytes, so that writing them cannot find the file system full; nothing of it is left where the block fails.

    Where its file system is full, embeddings that nobody has pinned are evicted, least recently used first,
    and it is tried once more; that holds the node's lock, so that nobody else takes the room.

    Raises:
        ArenaFullError: there is no room, and evicting made none.
        OSError: something else is wrong.
    """
    root = path.parents[2]
    file = None
    if (
        _file_system(root)[1] >= size_bytes
    ):  # asked before, as to try takes others' room for a moment
        file, _ = _reserve(path, size_bytes)
    if file is None:
        with locked(root):
            _free_room(root, size_bytes, key)
            file, error = _reserve(path, size_bytes)
            if file is None:
                raise _full(root, size_bytes, key, str(error)) from error
    try:
        with file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)  # it would be memory that nobody frees
        raise


def write_all(file: BinaryIO, part: bytes | memoryview) -> None:
    """Write all of a part to an unbuffered file, which may take less at a time."""
    view = memoryview(part).cast("B")
    while view.nbytes:
        view = view[file.write(view) :]


def write_whole(path: Path, *parts: bytes | memoryview, key: str) -> None:
    """Write a file of a worker's staging folder as :func:`whole_file` makes it, or leave nothing."""
    with whole_file(path, sum(memoryview(part).nbytes for part in parts), key=key) as file:
        for part in parts:
            write_all(file, part)


def _reserve(path: Path, size_bytes: int) -> tuple[BinaryIO | None, OSError | None]:
    """An open file with room, or the error if there was none for it; then nothing of it is left."""
    try:
        file = open(path, "wb", buffering=0)
        try:
            os.posix_fallocate(file.fileno(), 0, max(1, size_bytes))
        except BaseException:
            file.close()
            raise
        return file, None
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return None, error
        raise


def _free_room(root: Path, needed_bytes: int, key: str) -> None:
    free, _ = _published(root)
    room_bytes = _file_system(root)[1]
    if room_bytes + sum(each.size_bytes for each in free) < needed_bytes:
        raise _full(root, needed_bytes, key, f"{room_bytes} bytes are free")
    evicted = 0
    for each in free:
        if _file_system(root)[1] >= needed_bytes:
            break
        each.evict()
        evicted += 1
    if evicted:
        logger.warning(
            "the file system of %s is full: %d embeddings were evicted before their time",
            root,
            evicted,
        )


def _published(root: Path) -> tuple[list[_Evictable], int]:
    """What may be evicted, least recently used first, and the bytes of what is pinned."""
    free = []
    pinned_bytes = 0
    for path, stat in entries(root / "data"):
        if stat.st_nlink == 1:
            free.append(_Evictable(stat.st_mtime_ns, stat.st_size, path))
        else:
            pinned_bytes += stat.st_size
    return sorted(free, key=lambda each: each.used_ns), pinned_bytes


def _full(root: Path, needed_bytes: int, key: str, reason: str) -> ArenaFullError:
    return ArenaFullError(
        f"the arena at {root} cannot take {needed_bytes} bytes: {reason}; "
        "give its tmpfs more room or lower EPD_ARENA_BYTES",
        key=key,
    )


def free_bytes(root: Path) -> float:
    """What the arena's file system has free."""
    return _file_system(root)[1]


def _file_system(root: Path) -> tuple[float, float]:
    """Its size and its free bytes; infinite where it has no bound of its own, as a tmpfs with ``size=0``."""
    stat = os.statvfs(root)
    if not stat.f_blocks:
        return math.inf, math.inf
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
