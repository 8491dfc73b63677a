"""A small tmpfs for a child process, in a mount namespace of its own, so that nothing of it is left."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


@functools.cache
def _unshare() -> tuple[str, ...]:
    """How this machine lets us mount: as root, or as one's own root; empty if it does not."""
    for command in (("unshare", "-m"), ("unshare", "-rm")):
        try:
            probe = [*command, "mount", "-t", "tmpfs", "none", "/mnt"]
            if subprocess.run(probe, capture_output=True, timeout=30, check=False).returncode == 0:
                return command
        except OSError:
            continue
    return ()


def on_small_tmpfs(mount_point: Path, size_bytes: int, command: Sequence[str]) -> list[str]:
    """The command, to be run with ``mount_point`` as a tmpfs of this size that nobody else sees.

    Where no file system may be mounted the test is skipped, and says so.
    """
    if not (unshare := _unshare()):
        pytest.skip(f"user {os.getuid()} may mount nothing here, not even with `unshare -rm`")
    mount_point.mkdir(parents=True, exist_ok=True)
    mount = f"mount -t tmpfs -o size={size_bytes} none {shlex.quote(str(mount_point))}"
    return [*unshare, "sh", "-c", f"{mount} && exec {shlex.join(command)}"]
