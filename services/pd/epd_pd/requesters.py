"""Requesters that die: their requests end with them, as nobody reads the answers.

A requester's heartbeat is seen through the registry, as this worker sees its own. Where its own is late the
way between is blocked, and then it says nothing of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from epd_common.bus import Registry
from epd_common.errors import UnavailableError
from epd_common.tasks import end
from epd_pd.cancels import Cancels

logger = logging.getLogger(__name__)

LOOK_S = 0.25

OWN_SHARE = 0.5
"""Of its own time to live, three heartbeats, a worker's own last beat may be old before it judges nobody. An
outage that it does not notice is shorter than one and a half of them, and then no requester that lives is
silent for three."""


@dataclass(slots=True)
class Beats:
    """When a process's last beat was seen, by the monotonic clock, and how old it may become."""

    seen: float
    ttl_s: float


@dataclass(slots=True)
class LifeSigns:
    """Who of the requesters is dead. Pure policy; all times by one monotonic clock.

    Attributes:
        clear_since: From then on nothing was in the way of heartbeats.
    """

    clear_since: float | None = None
    _known: dict[str, Beats] = field(default_factory=dict)

    def look(self, now: float, own: Beats | None, requesters: dict[str, Beats | None]) -> set[str]:
        """Those who are dead now.

        Args:
            own: This worker's own beats, as the registry shows them.
            requesters: Those whose requests run here. One that has left the registry is judged by its last
                beat; one that was never in it is not judged, and its requests have their deadlines.
        """
        if own is None or now - own.seen >= OWN_SHARE * own.ttl_s:
            self.clear_since = None
        elif self.clear_since is None:
            self.clear_since = now
        known = {name: beats or self._known.get(name) for name, beats in requesters.items()}
        self._known = {name: beats for name, beats in known.items() if beats is not None}
        if own is None or self.clear_since is None:
            return set()
        return {
            name
            for name, beats in self._known.items()
            # Where its heart beats faster than the own one, an outage could be too short to be noticed here.
            if now - max(beats.seen, self.clear_since) >= max(beats.ttl_s, own.ttl_s)
        }


@contextlib.asynccontextmanager
async def ending_with_requesters(
    registry: Registry, cancels: Cancels, *, own: str, noted: Callable[[int], None]
) -> AsyncIterator[None]:
    """While open, requests whose requester has died are cancelled.

    Args:
        own: Key of this worker's own record.
        noted: Is told how many.
    """

    def beats(name: str) -> Beats | None:
        view = registry.view(name)
        return Beats(view.seen, view.record.ttl_s) if view is not None else None

    async def follow() -> None:
        signs = LifeSigns()
        while True:
            running = [
                watched
                for watched in cancels.running
                if watched.requester and not watched.cancelled.is_set()
            ]
            names = {watched.requester for watched in running}
            dead = signs.look(time.monotonic(), beats(own), {name: beats(name) for name in names})
            for name in dead:
                theirs = [watched for watched in running if watched.requester == name]
                for watched in theirs:
                    watched.cancel(_silent(name))
                noted(len(theirs))
                logger.warning("requester %s has died; %d requests of it end", name, len(theirs))
            await asyncio.sleep(LOOK_S)

    task = asyncio.create_task(follow(), name="requesters")
    try:
        yield
    finally:
        await end(task)


def _silent(name: str) -> UnavailableError:
    """For a requester that only stood still, and reads this when it goes on."""
    return UnavailableError(
        f"{name}, which sent this request, gave no sign of life for too long; send the request again",
        code="requester_silent",
        stage="generate",
        retry_after_s=1.0,
    )
