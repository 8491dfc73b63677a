"""The arena: a node's embeddings as files on tmpfs.

* Publish: write a temporary file, then rename it, so a reader sees all of it or nothing.
* Pin: a hard link in the consumer's own folder, hidden by a dot until it was verified. An eviction
  removes the arena's name for the file, never the memory under a reader; a dead consumer's pins are swept
  when any worker of the node starts, and by those that live.
* Read: ``mmap``. That a pinned file exists is the readiness that the engine's processes see.

Layout below the root::

    data/<key>             published embeddings
    staging/<worker>/...   being written by an encoder's engine
    landing/<worker>/...   being read from another node (``nixl/landing.py``)
    pins/<worker>/<key>    pinned by a PD worker
    owners/<worker>        locked while that worker lives, so that others can tell

All file operations here take microseconds on tmpfs, apart from copying payloads and checksums, which run
in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import shutil
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from stat import S_ISREG
from typing import Any

from epd_common.errors import EpdError
from epd_common.protocol.keys import is_key
from epd_common.store.base import StoreFullError
from epd_common.store.embedding import (
    HEADER_BYTES,
    Embedding,
    EmbeddingHeader,
    IntegrityError,
    pack_header,
    unpack_header,
)
from epd_common.store.room import (
    entries,
    keep_quota,
    locked,
    quota_that_fits,
    whole_file,
    write_all,
)
from epd_common.tasks import end

logger = logging.getLogger(__name__)


SWEEP_S = 10.0
"""Seconds between looks for what dead workers left."""


class ArenaInUseError(EpdError):
    """Two processes with one worker id on one node."""


class Arena:
    """A node's arena; every process of the node opens its own.

    Args:
        root: A folder on tmpfs.
        quota_bytes: Published embeddings above this are evicted, least recently used first. Pinned
            ones stay: their memory is in use anyway. Opening lowers it where the file system is smaller.
        worker: Names this process's folders for staging and pins.
    """

    name = "arena"

    def __init__(self, root: Path, *, quota_bytes: int, worker: str) -> None:
        self.root = root
        self._data = root / "data"
        self._owners = root / "owners"
        self._ownership: int | None = None
        self._lock_path = root / "lock"
        self.quota_bytes = quota_bytes
        self._numbers = itertools.count(1)  # a step is atomic, and writers are threads
        self._worker = worker
        self.staging = root / "staging" / worker  # files there are written by ``room.whole_file``
        self.landing = root / "landing" / worker
        self.pins = root / "pins" / worker
        self.evicted = 0
        """Embeddings that went to keep the quota when this process published one."""

    def open(self) -> None:
        """Create the folders, and drop what dead workers of this node left."""
        for folder in (self._data, self._owners):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock_path.touch()
        with locked(self.root):  # else one that opens now could sweep the lock we are about to take
            self._sweep()
            self._ownership = _try_lock(self._owners / self._worker)
        if self._ownership is None:
            raise ArenaInUseError(
                f"another process uses the arena at {self.root} as worker {self._worker!r}; "
                "give each worker an EPD_WORKER_ID of its own"
            )
        for folder in (self.staging, self.pins):
            folder.mkdir(parents=True)
        self.quota_bytes = quota_that_fits(self.root, self.quota_bytes)

    def sweep(self) -> list[str]:
        """Drop what dead workers of this node left; their names."""
        with locked(self.root):
            return self._sweep()

    def _sweep(self) -> list[str]:
        dead = []
        for owner in self._owners.iterdir():
            if owner.name == self._worker and self._ownership is not None:
                continue
            if (descriptor := _try_lock(owner)) is not None:
                self._drop(owner.name)
                owner.unlink(missing_ok=True)
                os.close(descriptor)
                dead.append(owner.name)
        return dead

    def report(self) -> dict[str, Any]:
        """What this worker has here, and what the dead left; ``bytes`` and ``files`` are the whole node's."""
        sizes = [stat.st_size for _, stat in entries(self._data)]
        with locked(self.root):
            dead = [owner for owner in self._owners.iterdir() if _is_free(owner)]
            left = [sum(1 for _ in (self.root / "pins" / owner.name).glob("*")) for owner in dead]
        return {
            "root": str(self.root),
            "files": len(sizes),
            "bytes": sum(sizes),
            "quota_bytes": self.quota_bytes,
            "pins": len(list(self.pins.iterdir())),
            "staged": len(list(self.staging.iterdir())),
            "dead_owners": len(dead),
            "dead_pins": sum(left),
        }

    def close(self) -> None:
        """Drop this process's pins and unfinished files."""
        if self._ownership is not None:
            self._drop(self._worker)
            with locked(self.root):
                (self._owners / self._worker).unlink(missing_ok=True)
                os.close(self._ownership)
            self._ownership = None

    def _drop(self, worker: str) -> None:
        for folder in ("staging", "landing", "pins"):
            shutil.rmtree(self.root / folder / worker, ignore_errors=True)

    # -- EmbeddingStore ------------------------------------------------------------------------

    async def put(self, embedding: Embedding) -> None:
        if not self._path(embedding.header.key).exists():
            await asyncio.to_thread(self.receive, embedding.header, (embedding.payload,))

    async def get(self, key: str) -> Embedding | None:
        return await asyncio.to_thread(self._read_verified, key)

    async def contains(self, key: str) -> bool:
        return self.touch(key)

    async def delete(self, key: str) -> None:
        self.discard(key)

    async def used_bytes(self) -> int:
        return self.published_bytes()

    # -- files ---------------------------------------------------------------------------------

    def receive(self, header: EmbeddingHeader, parts: Iterable[memoryview]) -> None:
        """Publish an embedding whose payload comes part by part; nothing of it, if they end with an error.

        Raises:
            StoreFullError: no room, and none can be made.
        """
        temporary = self.staging / f"put-{next(self._numbers)}-{header.key}"
        try:
            with whole_file(temporary, header.file_bytes, key=header.key) as file:
                write_all(file, pack_header(header))
                for part in parts:
                    write_all(file, part)
            self._publish(temporary, header)
        except OSError as error:
            raise StoreFullError(
                f"the arena at {self._data} cannot take {header.file_bytes} bytes: {error}; "
                "give its tmpfs more room or lower EPD_ARENA_BYTES",
                key=header.key,
            ) from error
        finally:
            temporary.unlink(missing_ok=True)

    def adopt(self, staged: Path, header: EmbeddingHeader) -> None:
        """Publish a staged file in place, with ``header`` as its header: no copy of the payload."""
        with open(staged, "r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != header.file_bytes:
                raise IntegrityError(
                    f"staged embedding {header.key} has {os.fstat(file.fileno()).st_size} bytes, "
                    f"its header says {header.file_bytes}"
                )
            file.write(pack_header(header))
        self._publish(staged, header)

    def published_bytes(self) -> int:
        """What is published, in bytes; a look at each file's name and size. 0 where the folder is gone."""
        try:
            return sum(stat.st_size for _, stat in entries(self._data))
        except FileNotFoundError:  # which must not end the heartbeats that tell this
            return 0

    def touch(self, key: str) -> bool:
        """Whether it is published; renews its place in the order of eviction."""
        try:
            os.utime(self._path(key))
        except FileNotFoundError:
            return False
        return True

    def discard(self, key: str) -> None:
        """Take back what is published under a key; who has it pinned keeps it."""
        self._path(key).unlink(missing_ok=True)

    def hold(self, key: str) -> Path | None:
        """Link a published embedding so that no eviction takes it, out of the engine's sight.

        None if it is neither there nor pinned already. :meth:`expose` shows it to the engine.
        """
        published, held = self._path(key), self._held(key)
        if self._pinned(key).exists():
            return self._pinned(key)
        try:
            os.link(published, held)
        except FileExistsError:
            return held
        except FileNotFoundError:  # which says nothing of a link from before the eviction
            return held if held.exists() else None
        os.utime(held)  # one inode: the arena's name counts as used, too
        return held

    def expose(self, key: str) -> None:
        """Make a held embedding a pin: from now on the engine may read it."""
        with contextlib.suppress(FileNotFoundError):  # it is a pin already
            os.rename(self._held(key), self._pinned(key))

    def pin(self, key: str) -> Path | None:
        """Hold and expose in one, for an embedding that needs no verification."""
        if self.hold(key) is None:
            return None
        self.expose(key)
        return self._pinned(key)

    def unpin(self, key: str) -> None:
        """Let go of it, whether it was exposed or only held."""
        self._held(key).unlink(missing_ok=True)
        self._pinned(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._data / _file_name(key)

    def _held(self, key: str) -> Path:
        return self._pinned(key).with_name(f".{key}")

    def _pinned(self, key: str) -> Path:
        return self.pins / _file_name(key)

    def _publish(self, file: Path, header: EmbeddingHeader) -> None:
        target = self._path(header.key)
        with locked(self.root):
            self.evicted += keep_quota(self.root, header.file_bytes, self.quota_bytes)
            os.rename(file, target)

    def _read_verified(self, key: str) -> Embedding | None:
        try:
            embedding = map_embedding(self._path(key))
            if embedding is not None:
                embedding.verify()
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self._path(key))
        except IntegrityError as error:
            logger.warning("dropping a damaged embedding: %s", error, extra={"key": key})
            self._path(key).unlink(missing_ok=True)
            return None
        return embedding


def _file_name(key: str) -> str:
    if not is_key(key):  # it must not lead out of its folder
        raise ValueError(f"not an embedding key: {key!r}")
    return key


def _try_lock(path: Path) -> int | None:
    """Lock a file for as long as the returned descriptor is open; None if another process has it."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _is_free(path: Path) -> bool:
    """Whether nobody holds the lock of a file; ask only under the arena's own lock."""
    if (descriptor := _try_lock(path)) is None:
        return False
    os.close(descriptor)
    return True


@contextlib.asynccontextmanager
async def sweeping(arena: Arena) -> AsyncIterator[None]:
    """While open, drop what other workers of this node leave when they are killed and do not come back."""

    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                if dead := await asyncio.to_thread(arena.sweep):
                    logger.warning("swept the arena of dead workers: %s", ", ".join(dead))
            except OSError as error:
                logger.warning("the arena could not be swept: %s", error)

    task = asyncio.create_task(sweep(), name="sweep the arena")
    try:
        yield
    finally:
        await end(task)


def map_embedding(path: Path) -> Embedding | None:
    """Map a file without reading it; None if it is not there.

    Raises:
        IntegrityError: the file's header is not one.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    except FileNotFoundError:
        return None
    try:
        if not S_ISREG(os.fstat(descriptor).st_mode):
            raise IntegrityError(f"{path.name} is no file")
        if os.fstat(descriptor).st_size < HEADER_BYTES:
            raise IntegrityError(f"{path.name} is shorter than an embedding's header")
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    view = memoryview(mapped)
    return Embedding(unpack_header(view), view[HEADER_BYTES:])
