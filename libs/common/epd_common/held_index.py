"""What a sender of requests knows of the prefix caches of PD workers, by what they say. No I/O.

It may miss messages, and workers may die or go on without it: who has not spoken for ``FRESH_S``, or of whom
a message was missed, counts as holding nothing, until it has said all again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set

from nats.aio.msg import Msg

from epd_common.kept import MOST_KEPT
from epd_common.protocol import Held, ProtocolError, decode, subjects

logger = logging.getLogger(__name__)

BEAT_S = 1.0
"""A worker speaks at least that often, though it has nothing new to say."""

WHOLE_S = 5.0
"""It says all again after this time: so long does who begins to listen, or missed something, go without."""

FRESH_S = 4.0
"""What a worker said is not relied on if it was silent for longer."""

MOST_WORKERS = 1024

_NOTHING: Set[str] = frozenset()


class _Told:
    """What one worker said."""

    __slots__ = ("complete", "epoch", "heard", "keys", "seq")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.seq = -1
        self.heard = 0.0
        self.complete = False
        self.keys: set[str] = set()

    def take(self, told: Held) -> None:
        """The next message of this epoch."""
        missed = told.seq != self.seq + 1
        self.seq = told.seq
        if told.whole:
            self.keys = set(told.keys[:MOST_KEPT])
            self.complete = True
            return
        if missed:
            self.complete = False
        if not self.complete:
            self.keys.clear()
            return
        self.keys.difference_update(told.gone)
        self.keys.update(told.keys)
        if len(self.keys) > MOST_KEPT:  # no worker of ours keeps more
            self.complete = False
            self.keys.clear()


class HeldIndex:
    """What is held where.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._workers: dict[str, _Told] = {}

    def take(self, told: Held) -> None:
        """A worker said something."""
        known = self._workers.get(told.worker)
        if known is not None and told.epoch < known.epoch and self._fresh(known):
            return  # late words of a process that is no more
        if known is None or told.epoch != known.epoch:
            known = self._workers[told.worker] = _Told(told.epoch)
        known.take(told)
        known.heard = self._clock()
        if len(self._workers) > MOST_WORKERS:
            del self._workers[min(self._workers, key=lambda name: self._workers[name].heard)]

    def sizes(self) -> list[int]:
        """How many beginnings each worker holds of whom that is known."""
        return [
            len(known.keys)
            for known in self._workers.values()
            if known.complete and self._fresh(known)
        ]

    def held_by(self, worker: str) -> Set[str]:
        """Keys of the beginnings that a worker holds, as far as that is known."""
        known = self._workers.get(worker)
        if known is None or not known.complete or not self._fresh(known):
            return _NOTHING
        return known.keys

    def _fresh(self, known: _Told) -> bool:
        return self._clock() - known.heard <= FRESH_S

    async def on_message(self, message: Msg) -> None:
        """Handles ``epd.v1.held.*``."""
        try:
            told = decode(message.data, Held)
        except ProtocolError as error:
            logger.warning("what a worker holds: unreadable: %s", error)
            return
        if message.subject != subjects.held_subject(told.worker):
            logger.warning("what a worker holds: %s claims to be another's", message.subject)
            return
        self.take(told)
