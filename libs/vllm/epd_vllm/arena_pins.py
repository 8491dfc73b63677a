"""The embeddings that an engine's requests hold in the arena: checked once, let go of with the last request.

The scheduler's process asks here. What it waits for are a link, a ``stat`` and the read of a header, all on
tmpfs; checksums are computed in a thread, and the engine sees no embedding before its own was right.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from epd_common.store.arena import Arena, map_embedding
from epd_common.store.embedding import EmbeddingHeader, IntegrityError


class Holding(Enum):
    """How far a request is with one of its embeddings."""

    READY = auto()
    CHECKING = auto()
    """Held, but its checksum is still being computed."""
    MISSING = auto()


@dataclass(frozen=True, slots=True)
class Fit:
    """What an embedding must be to be of use to an engine."""

    fingerprint: str
    width: int
    dtype: str


@dataclass(slots=True)
class _Pin:
    header: EmbeddingHeader
    verified: Future[None]
    exposed: bool = False
    users: set[str] = field(default_factory=set)
    """Ids of the requests that hold it."""


class ArenaPins:
    """One engine's pins.

    Args:
        arena: Opened; the pins lie in its folder for this worker.
        fit: Embeddings of other models are refused.
    """

    def __init__(self, arena: Arena, fit: Fit) -> None:
        self._arena = arena
        self._fit = fit
        self._pins: dict[str, _Pin] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="epd-checksum")

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._pins.clear()
        self._arena.close()

    def path(self, key: str) -> Path:
        return self._arena.pins / key

    def ready(self, key: str) -> bool:
        """Whether some request holds it, verified."""
        pin = self._pins.get(key)
        return pin is not None and pin.exposed

    def users(self, key: str) -> frozenset[str]:
        """Ids of the requests that hold it."""
        pin = self._pins.get(key)
        return frozenset(pin.users) if pin is not None else frozenset()

    def acquire(self, key: str, request_id: str, rows: int) -> Holding:
        """Hold an embedding for a request until :meth:`release`; ask again while it is not ready.

        A damaged or foreign one is taken out of the arena, so that it can be published again.

        Raises:
            IntegrityError: what lies under the key is of no use to a request with ``rows`` placeholders.
        """
        pin = self._pins.get(key) or self._hold(key)
        if pin is None:
            return Holding.MISSING
        if pin.header.rows != rows:
            if not pin.users:
                self._drop(key)
            raise IntegrityError(
                f"embedding {key} has {pin.header.rows} rows for {rows} placeholders"
            )
        pin.users.add(request_id)
        if not pin.verified.done():
            return Holding.CHECKING
        if error := pin.verified.exception():
            self._drop(key)
            self._arena.discard(key)
            raise IntegrityError(str(error)) from error
        if not pin.exposed:
            self._arena.expose(key)
            pin.exposed = True
        return Holding.READY

    def release(self, request_id: str) -> None:
        """The request has ended."""
        for key, pin in list(self._pins.items()):
            pin.users.discard(request_id)
            if not pin.users:
                self._drop(key)

    def _hold(self, key: str) -> _Pin | None:
        held = self._arena.hold(key)
        if held is None:
            return None
        try:
            embedding = map_embedding(held)
            if embedding is None:
                return None
            self._check(key, embedding.header)
        except IntegrityError:
            self._arena.unpin(key)
            self._arena.discard(key)
            raise
        pin = self._pins[key] = _Pin(embedding.header, self._thread.submit(embedding.verify))
        return pin

    def _check(self, key: str, header: EmbeddingHeader) -> None:
        """Compare a header with what the engine can take; the thread looks at the payload."""
        if header.key != key:
            raise IntegrityError(f"embedding {key} names another key: {header.key}")
        found = Fit(header.fingerprint, header.width, header.dtype)
        if found != self._fit:
            raise IntegrityError(f"embedding {key} is of another model: {found}, not {self._fit}")

    def _drop(self, key: str) -> None:
        self._pins.pop(key, None)
        self._arena.unpin(key)
