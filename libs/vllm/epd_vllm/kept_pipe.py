"""From the engine's process to its service: which beginnings of prompts are kept, through a named pipe.

Each line is ``+`` or ``-`` and keys, or ``=``: all before it are forgotten. The engine never waits: where the
pipe is full it begins anew, with all that is kept, when there is room again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from epd_common.kept import Kept

LINE_KEYS = 200
"""Keys of a line, which then is below what a pipe takes whole or not at all (4096 bytes)."""

READ_BYTES = 1 << 16


class KeptWriter:
    """The engine's end.

    Args:
        path: Of the pipe, whose other end is open.
        kept: Gives all keys that are kept now.
    """

    def __init__(self, path: Path, kept: Callable[[], Sequence[str]]) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        self._kept = kept
        self._behind = False

    def told(self, added: Sequence[str], gone: Sequence[str]) -> None:
        """Pass a change on."""
        lines = [*_lines("+", added), *_lines("-", gone)]
        if self._behind:
            lines = [b"=\n", *_lines("+", self._kept())]
        try:
            for line in lines:
                os.write(self._file, line)
            self._behind = False
        except OSError:  # full, or the service is gone, and this process soon
            self._behind = True


def _lines(sign: str, keys: Sequence[str]) -> Iterable[bytes]:
    for begin in range(0, len(keys), LINE_KEYS):
        yield " ".join([sign, *keys[begin : begin + LINE_KEYS]]).encode() + b"\n"


class KeptReader:
    """The service's end: keeps ``kept`` as the engine says."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._rest = b""
        self._file = -1

    def open(self, path: Path) -> None:
        """Make the pipe, and read it in the running loop. Once both ends are open its file may go."""
        os.mkfifo(path, 0o600)
        # For both, or it would have ended before the engine opens it.
        self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(self._file, self._read)

    def close(self) -> None:
        if self._file < 0:
            return
        asyncio.get_running_loop().remove_reader(self._file)
        os.close(self._file)
        self._file = -1
        self._kept.clear()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            *lines, self._rest = (self._rest + os.read(self._file, READ_BYTES)).split(b"\n")
            for line in lines:
                sign, *keys = line.decode().split(" ")
                if sign == "=":
                    self._kept.clear()
                elif sign == "+":
                    self._kept.note(keys, ())
                else:
                    self._kept.note((), keys)
