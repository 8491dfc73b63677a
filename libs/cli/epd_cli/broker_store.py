"""A broker that runs and cannot write its files: whether there is room, and when it is started anew.

A stream of NATS whose write failed, as on a full disk, refuses all that come after it until its server is
started again, also once there is room. Its process, its connections and its streams' state look well
meanwhile.
A server that is started on a full disk does not come up, so room is waited for first.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

LOOK_S = 1.0
UNUSABLE_S, LONGEST_S = 5.0, 60.0
"""A server is started anew after it was unusable for so long; twice as long each time, up to the second."""

STEADY_S = 60.0
"""One that was well for so long had a good start: the next time is quick again."""

ROOM_BYTES = 8 << 20
"""Free bytes without which it is not started: enough for its own files at the start."""


class StoreWatch:
    """Decides when a server that cannot write is started anew. Pure policy; times are monotonic seconds."""

    def __init__(self) -> None:
        self._bound_s = UNUSABLE_S
        self._unusable_since: float | None = None
        self._well_since: float | None = None

    def look(self, problem: str, now: float) -> bool:
        """Whether to start it anew now, as it has had a problem for long enough."""
        if not problem:
            self._unusable_since = None
            if self._well_since is None:
                self._well_since = now
            if now - self._well_since >= STEADY_S:
                self._bound_s = UNUSABLE_S
            return False
        self._well_since = None
        if self._unusable_since is None:
            self._unusable_since = now
        if now - self._unusable_since < self._bound_s:
            return False
        self._unusable_since = None
        self._bound_s = min(2 * self._bound_s, LONGEST_S)
        return True


def has_room(folder: Path) -> bool:
    """Whether the file system of a broker's folder has room for its files."""
    return shutil.disk_usage(folder).free >= ROOM_BYTES


async def until_room(name: str, folder: Path, say: Callable[[str], None]) -> None:
    """Return once there is room; where there is none at first, say so."""
    if has_room(folder):
        return
    say(f"the disk of {folder} is full: {name} is started once {ROOM_BYTES >> 20} MiB are free")
    while not has_room(folder):  # noqa: ASYNC110 - nobody tells of it
        await asyncio.sleep(LOOK_S)
