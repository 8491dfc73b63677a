"""This process's NIXL agent: memory that it lets others read, peers, one-sided reads, short notices.

All calls block, and may be made from any thread. NIXL's own Python class starts a progress thread that never
sleeps, and burns a core; so its compiled part is used as that class uses it, with a pause.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from epd_common.store.embedding import HEADER_BYTES, MAGIC
from epd_common.store.nixl.errors import NixlMissingError, NotReadError
from epd_common.store.nixl.memory import MemoryKind, Span

LAYOUT = 1
"""Of regions, locators, peers' records and notices."""

PROGRESS_US = 200
"""Pause of the progress thread, on which a peer's first contact waits; 1.6 % of a core when idle."""

LOOK_S = 0.0001
"""Between looks at a read that is under way."""

QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
"""That a peer has died is said once, by us; both say it on stderr at each step, in forms of their own."""


def compatibility() -> str:
    """Equal for processes that can read each other: NIXL's version, and the form of what lies in memory."""
    form = (_version(), LAYOUT, MAGIC, HEADER_BYTES)
    return hashlib.sha256(repr(form).encode()).hexdigest()[:16]


def _version() -> str:
    try:
        return importlib.metadata.version("nixl")
    except importlib.metadata.PackageNotFoundError as error:
        raise NixlMissingError(
            "EPD_STORES names nixl, and the package nixl is not installed: pip install 'epdflow[nixl]'"
        ) from error


def _library() -> Any:
    _version()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        importlib.import_module("nixl")  # finds the package for this machine's CUDA
        return importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise NixlMissingError(f"the package nixl cannot be used here: {error}") from error


class Agent:
    """One of a process.

    Args:
        name: No other process may ever have had it: peers remember what they know of a name.

    Raises:
        NixlMissingError: the package is not there, or has no UCX.
    """

    def __init__(self, name: str) -> None:
        nixl = self._nixl = _library()
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = PROGRESS_US
        self.name = name
        self._kinds: dict[MemoryKind, Any] = {"DRAM": nixl.DRAM_SEG, "VRAM": nixl.VRAM_SEG}
        self._errors: tuple[type[Exception], ...] = tuple(
            getattr(nixl, each)
            for each in dir(nixl)
            if each.startswith("nixl") and each.endswith("Error")
        )
        self._connecting = threading.Lock()
        self._connected: set[str] = set()
        try:
            self._agent = nixl.nixlAgent(name, config)
            self._backend = self._agent.createBackend("UCX", {})
        except self._errors as error:
            raise NixlMissingError(f"NIXL could not be started with UCX: {error}") from error

    def register(self, span: Span) -> None:
        """Let NIXL use some memory, and peers that hold :meth:`metadata` from now on read it.

        Raises:
            NotReadError: it cannot.
        """
        try:
            self._agent.registerMem(self._registered(span), [self._backend])
        except self._errors as error:
            raise NotReadError(
                "memory",
                f"NIXL cannot register {span.size} bytes of {span.kind} ({error}); is the limit of locked "
                "memory (ulimit -l) too low?",
            ) from error

    def deregister(self, span: Span) -> None:
        with contextlib.suppress(*self._errors):
            self._agent.deregisterMem(self._registered(span), [self._backend])

    def metadata(self, span: Span) -> bytes:
        """What a peer needs in order to read registered memory."""
        return bytes(self._agent.getLocalPartialMD(self._registered(span), True, [self._backend]))

    def connect(self, peer: str, metadata: bytes) -> None:
        """Know a peer, by metadata of an origin that is trusted: NIXL may crash on others.

        Raises:
            NotReadError: it is gone.
        """
        with self._connecting:
            if peer in self._connected:
                return
            with self._reaching(peer):
                self._agent.loadRemoteMD(metadata)
            self._connected.add(peer)

    def forget(self, peer: str) -> None:
        """Drop the connection to a peer; reads from it that are under way fail."""
        with self._connecting, contextlib.suppress(*self._errors):
            self._connected.discard(peer)
            self._agent.invalidateRemoteMD(peer)

    def read(self, peer: str, source: Span, target: Span, *, until: float) -> None:
        """Copy from a peer's memory into registered memory of this process.

        Args:
            until: By the monotonic clock.

        Raises:
            NotReadError: the peer is gone, or was too slow: then something may still come into ``target``.
        """
        nixl = self._nixl
        ours, theirs = (
            nixl.nixlXferDList(self._kinds[span.kind], [(span.address, span.size, span.device)])
            for span in (target, source)
        )
        with self._reaching(peer):
            transfer = self._agent.createXferReq(
                nixl.NIXL_READ, ours, theirs, peer, "", [self._backend]
            )
            try:
                state = self._agent.postXferReq(transfer, "")
                while state == nixl.NIXL_IN_PROG:
                    if time.monotonic() > until:
                        raise NotReadError("late", f"peer {peer} did not answer in time")
                    state = self._agent.getXferStatus(transfer)
                    if state == nixl.NIXL_IN_PROG:
                        time.sleep(LOOK_S)
            finally:
                self._agent.releaseXferReq(transfer)

    def say(self, peer: str, notice: str) -> None:
        """Tell a peer something, without waiting for it."""
        with contextlib.suppress(*self._errors):
            self._agent.genNotif(peer, notice, [self._backend])

    def notices(self) -> list[tuple[str, bytes]]:
        """What peers have sent since the last call: who, and what."""
        with contextlib.suppress(*self._errors):
            found = self._agent.getNotifs({}, [self._backend])
            return [(peer, bytes(text)) for peer, texts in found.items() for text in texts]
        return []

    def close(self) -> None:
        """End it. What is registered must not be used by then."""
        del self._agent

    def _registered(self, span: Span) -> Any:
        return self._nixl.nixlRegDList(
            self._kinds[span.kind], [(span.address, span.size, span.device, "")]
        )

    @contextlib.contextmanager
    def _reaching(self, peer: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise NotReadError("gone", f"peer {peer} cannot be reached: {error}") from error
