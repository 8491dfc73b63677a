"""The machine: Python, vLLM, memory file systems, open files."""

from __future__ import annotations

import math
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from epd_cli.checks.finding import Finding, size
from epd_common.errors import EpdError
from epd_common.store.room import QUOTA_SHARE, SMALLEST_SHARE, entries

OLDEST_PYTHON = (3, 11)

SHM = Path("/dev/shm")
ENGINE_SHM_BYTES = 256 << 20
"""What vLLM's processes may take of ``/dev/shm`` where an engine has several: its ring of messages has ten
places of 16 MiB, and it dies of a bus error where that is not there."""

FEW_FILES, TOO_FEW_FILES = 4096, 512
"""Open files of a process: each HTTP connection is one; vLLM alone opens a few hundred."""


def python(version: tuple[int, int, int]) -> Finding:
    """The interpreter that runs this."""
    said = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return Finding("Python", "wrong", said, f"use Python {oldest} or later")
    return Finding("Python", "ok", said)


def vllm(found: tuple[str, bool] | EpdError, *, needed: bool) -> Finding:
    """The installed vLLM.

    Args:
        found: Version, and whether it is the CPU build; or why there is none that can be used.
    """
    if isinstance(found, EpdError):
        if not needed:
            return Finding("vLLM", "ok", f"not needed here ({found.message})")
        what, _, advice = found.message.partition(": ")
        return Finding("vLLM", "wrong", what, advice)
    version, is_cpu = found
    return Finding("vLLM", "ok", f"{version}{' (CPU build)' if is_cpu else ''}")


@dataclass(frozen=True, slots=True)
class Room:
    """A memory file system: its size and what is free of it, in bytes; infinite where it has no bound.

    Attributes:
        ours_bytes: What an arena has there already.
        kind: As the kernel names it, e.g. ``tmpfs``.
        usable: This user may make a folder there, or write into the one that is there.
    """

    size_bytes: float
    free_bytes: float
    kind: str = "tmpfs"
    ours_bytes: int = 0
    usable: bool = True


def arena(folder: Path, room: Room, wanted_bytes: int) -> Finding:
    """Whether the node's arena has room for ``EPD_ARENA_BYTES``."""
    name = "arena"
    if not room.usable:
        return Finding(
            name,
            "wrong",
            f"{folder}: this user may not make it, or write into it",
            "set EPD_ARENA_DIR to a folder on tmpfs that this user may write to",
        )
    said = f"{folder}: {size(room.size_bytes)}, {size(room.free_bytes)} free, on {room.kind}"
    if math.isinf(room.size_bytes):
        said = f"{folder}: a {room.kind} without a bound of its own"
    more = (
        "give its tmpfs more room (Docker: shm_size, --shm-size, or a larger volume for the arena)"
    )
    wanted = f"EPD_ARENA_BYTES={wanted_bytes} ({size(wanted_bytes)})"
    if room.size_bytes * QUOTA_SHARE < wanted_bytes * SMALLEST_SHARE:
        return Finding(
            name, "wrong", f"{said}; no worker starts there with {wanted}", f"{more}, or lower it"
        )
    if room.size_bytes * QUOTA_SHARE < wanted_bytes:
        return Finding(name, "note", f"{said}; it takes less than {wanted}", f"{more}, or lower it")
    if room.free_bytes + room.ours_bytes < wanted_bytes:
        return Finding(
            name,
            "note",
            f"{said}; others fill it, {wanted} do not fit beside them",
            "remove what is left there of others, or lower EPD_ARENA_BYTES",
        )
    if room.kind not in ("tmpfs", "ramfs"):
        return Finding(
            name, "note", f"{said}, which is slower than memory", "set EPD_ARENA_DIR to a tmpfs"
        )
    return Finding(name, "ok", said)


def shared_memory(room: Room) -> Finding:
    """``/dev/shm``, through which the processes of an engine talk where it has several."""
    said = f"{size(room.size_bytes)}, {size(room.free_bytes)} free"
    if math.isinf(room.size_bytes):
        said = "without a bound of its own"
    if room.free_bytes < ENGINE_SHM_BYTES:
        return Finding(
            "/dev/shm",
            "note",
            f"{said}; an engine with several processes (--tensor-parallel-size) needs "
            f"{size(ENGINE_SHM_BYTES)}",
            "give it more (Docker: shm_size, --shm-size) if yours has",
        )
    return Finding("/dev/shm", "ok", said)


def open_files(soft: int, hard: int) -> Finding:
    """The limit on open files of a process; a negative number is none."""
    said = f"{soft if soft >= 0 else 'unlimited'}, at most {hard if hard >= 0 else 'unlimited'}"
    advice = "raise it (`ulimit -n 65536`; systemd: LimitNOFILE; compose: ulimits)"
    if 0 <= soft < TOO_FEW_FILES:
        return Finding("open files", "wrong", said, advice)
    if 0 <= soft < FEW_FILES:
        return Finding(
            "open files", "note", f"{said}: as many connections at most that a gateway has", advice
        )
    return Finding("open files", "ok", said)


# -- facts ------------------------------------------------------------------------------------------


_NO_FILES = ("proc", "sysfs")
"""File systems of the kernel, in which not even root makes a folder."""


def room_of(folder: Path) -> Room:
    """The file system that a folder is on, or would be made on."""
    there = folder
    while not there.exists():
        there = there.parent
    stat = os.statvfs(there)
    size_bytes = float(stat.f_blocks * stat.f_frsize) if stat.f_blocks else math.inf
    free_bytes = float(stat.f_bavail * stat.f_frsize) if stat.f_blocks else math.inf
    data = folder / "data"
    ours_bytes = sum(stat.st_size for _, stat in entries(data)) if data.is_dir() else 0
    kind = _kind(there)
    usable = there.is_dir() and os.access(there, os.W_OK | os.X_OK) and kind not in _NO_FILES
    return Room(size_bytes, free_bytes, kind, ours_bytes, usable)


def _kind(folder: Path) -> str:
    """The type of the file system: that of the innermost mount point above the folder."""
    here = str(folder.resolve())
    kind, longest = "?", -1
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        point, found = line.split()[1:3]
        point = point.encode().decode("unicode_escape")  # a space is \040
        if (here + "/").startswith(point.rstrip("/") + "/") and len(point) >= longest:
            kind, longest = found, len(point)
    return kind


def file_limits() -> tuple[int, int]:
    """Soft and hard limit of open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def python_version() -> tuple[int, int, int]:
    return (sys.version_info.major, sys.version_info.minor, sys.version_info.micro)
