"""Ports: free, or who holds them. Read from ``/proc``, so that it works in images without more packages."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from epd_cli.checks.finding import Finding

_LISTENING = "0A"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that listens on a port; ``pid`` is 0 where the kernel does not say which one it is."""

    pid: int
    command: str = ""


def port(number: int, setting: str, holder: Holder | None, *, own_pids: set[int]) -> Finding:
    """Whether a port is free for the gateway.

    Args:
        setting: The variable that chooses it.
        own_pids: Processes of the stack that runs here.
    """
    name = f"port {number}"
    if number == 0:
        return Finding("port", "ok", f"{setting}=0: a free one is taken")
    if holder is None:
        return Finding(name, "ok", "free")
    if holder.pid in own_pids or "epd-gateway" in holder.command or "epd_gateway" in holder.command:
        return Finding(name, "ok", f"held by a gateway of epdflow, process {holder.pid}")
    who = f"process {holder.pid} ({holder.command})" if holder.pid else "a process of another user"
    return Finding(name, "wrong", f"held by {who}", f"stop that, or set {setting} to another port")


def holder_of(number: int) -> Holder | None:
    """Who listens on a TCP port of this machine (of this container), on whatever address."""
    sockets = _listening(number)
    if not sockets:
        return None
    wanted = {f"socket:[{inode}]" for inode in sockets}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # another user's, or gone
            if any(target in wanted for target in _open_files(process / "fd")):
                return Holder(int(process.name), _command(process))
    return Holder(0)


def _open_files(folder: Path) -> list[str]:
    found = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(os.readlink(folder / name))
    return found


def _listening(number: int) -> set[str]:
    """Inodes of the sockets that listen on a port."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == number:
                    found.add(fields[9])
    return found


def _command(process: Path) -> str:
    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return " ".join(words).strip()[:120]
