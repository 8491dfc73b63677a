"""Reading one embedding out of a peer's memory: its header, then its rows piece by piece.

All that a locator says is checked before anything is read, and all that was read before it is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from epd_common.protocol import Locator
from epd_common.store.embedding import (
    HEADER_BYTES,
    EmbeddingHeader,
    IntegrityError,
    RunningChecksum,
    unpack_header,
)
from epd_common.store.nixl.agent import Agent
from epd_common.store.nixl.errors import NotReadError
from epd_common.store.nixl.landing import WINDOW_BYTES, Landing, Place
from epd_common.store.nixl.peers import Peer

PIECE_BYTES = WINDOW_BYTES
"""Read at once. A notice on its way holds up the end of the next read, so there are few of both."""

LEASE, RELEASE = "lease", "release"
"""Notices, followed by a slot's generation."""

SUSPECT_S: Final = 5.0
"""A peer that was gone or late is not tried again for so long: each try may cost the whole time-out."""


def notice(word: str, generation: int) -> str:
    return f"{word} {generation}"


def checked(locator: Locator, peer: Peer, compat: str) -> None:
    """See that a locator can be true.

    Raises:
        NotReadError: it cannot.
    """
    if not locator.compat == peer.compat == compat:
        raise NotReadError(
            "incompatible",
            f"peer {locator.agent} has another version of NIXL or of epdflow; give both sides the same",
        )
    inside = 0 <= locator.offset <= peer.size - locator.bytes
    if not (HEADER_BYTES < locator.bytes <= peer.size and inside):
        raise NotReadError(
            "refused",
            f"a locator names {locator.bytes} bytes from {locator.offset} on, in a region of {peer.size}",
        )


class Reader:
    """Reads for one process, in the threads of its callers.

    Args:
        timeout_s: Of one embedding, from the first word to its peer to the last byte.
    """

    def __init__(self, agent: Agent, landing: Landing, *, compat: str, timeout_s: float) -> None:
        self._agent = agent
        self._landing = landing
        self._compat = compat
        self._timeout_s = timeout_s
        self._suspects: dict[str, float] = {}

    def refuse_suspect(self, agent: str) -> None:
        """See that a peer was not found to be away a moment ago.

        Raises:
            NotReadError: it was.
        """
        if self._suspects.get(agent, 0.0) > time.monotonic():
            raise NotReadError("gone", f"peer {agent} did not answer a moment ago")

    def read(
        self,
        key: str,
        locator: Locator,
        peer: Peer,
        fits: Callable[[EmbeddingHeader], bool],
    ) -> EmbeddingHeader | None:
        """Have an embedding in the arena; None if it is of no use there.

        Raises:
            NotReadError: it could not be read.
            StoreFullError: the arena has no room.
        """
        checked(locator, peer, self._compat)
        try:
            return self._read(key, locator, peer, fits, time.monotonic() + self._timeout_s)
        except NotReadError as error:
            if error.reason in ("gone", "late"):
                self._suspect(locator.agent)
            raise

    def _read(
        self,
        key: str,
        locator: Locator,
        peer: Peer,
        fits: Callable[[EmbeddingHeader], bool],
        until: float,
    ) -> EmbeddingHeader | None:
        agent, name = self._agent, locator.agent
        agent.connect(name, peer.metadata)
        place = self._landing.take(locator.bytes, key=key)
        try:
            header = self._read_header(key, locator, peer, place, until)
            fitting = fits(header)
            if fitting:
                self._read_rows(header, locator, peer, place, until)
        except NotReadError as error:
            if error.reason in ("gone", "late"):
                agent.forget(name)  # then nothing new is begun; what was may still come
                self._landing.quarantine(place)
            else:
                self._landing.give_back(place)
            raise
        except BaseException:
            self._landing.give_back(place)
            raise
        if not fitting:
            self._landing.give_back(place)
            return None
        self._landing.publish(place, header)
        return header

    def _read_header(
        self, key: str, locator: Locator, peer: Peer, place: Place, until: float
    ) -> EmbeddingHeader:
        """The header of what lies there, which must be what was announced."""
        source = peer.span.part(locator.offset, HEADER_BYTES)
        self._agent.read(locator.agent, source, place.target(0, HEADER_BYTES), until=until)
        try:
            header = unpack_header(bytes(place.took(0, HEADER_BYTES)))
        except IntegrityError as error:
            raise NotReadError("stale", f"no embedding lies there any more: {error}") from error
        if header.key != key or header.file_bytes != locator.bytes:
            raise NotReadError("stale", f"another embedding lies where {key} was")
        return header

    def _read_rows(
        self,
        header: EmbeddingHeader,
        locator: Locator,
        peer: Peer,
        place: Place,
        until: float,
    ) -> None:
        """The rest, verified; under a lease, unless it is one piece: that is here before the word arrives."""
        leases = locator.bytes - HEADER_BYTES > PIECE_BYTES
        if leases:
            self._agent.say(locator.agent, notice(LEASE, locator.generation))
        checksum = RunningChecksum()
        try:
            for start in range(HEADER_BYTES, locator.bytes, PIECE_BYTES):
                size = min(PIECE_BYTES, locator.bytes - start)
                source = peer.span.part(locator.offset + start, size)
                self._agent.read(locator.agent, source, place.target(start, size), until=until)
                checksum.update(place.took(start, size))
        finally:
            if leases:
                self._agent.say(locator.agent, notice(RELEASE, locator.generation))
        if checksum.hex() != header.checksum:
            raise NotReadError(
                "stale", f"what was read of {header.key} is not what its header says"
            )

    def _suspect(self, agent: str) -> None:
        now = time.monotonic()
        self._suspects = {name: until for name, until in self._suspects.items() if until > now}
        self._suspects[agent] = now + SUSPECT_S
