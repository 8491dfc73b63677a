"""Processes that decode, each asked for one picture at a time, without a thread of this process.

One is started when all others are at work, and stays for the next picture: what a picture costs beside
its decode is its bytes' way through a socket. One that takes too long, dies or says nonsense is killed; the
next picture gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import epd_common
from epd_common.decoding.child import ANSWER, HEAD, READY
from epd_common.decoding.pictures import CorruptError, Picture, TooManyPixelsError
from epd_common.decoding.structure import TooComplexError

GRACE_S = 1.0
"""So much later than a process's own alarm the parent stops to wait for it."""

START_S = 30.0
"""Seconds that the start of a process may take."""

MAX_ANSWER_BYTES = 4096

_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "LANG")


class DecoderStartError(Exception):
    """No process could be started; the text says why."""


class DecoderDiedError(Exception):
    """The process ended, or said nonsense, over a file."""


class DecodeTimeoutError(Exception):
    """A file took too long."""


class DecodeMemoryError(Exception):
    """A file needs more memory than a process may have."""


class _Process:
    """One program of ``child``, and the socket to it. Starting and ending it block; asking it does not.

    Raises:
        DecoderStartError: it could not be started.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = self._start(theirs, memory_bytes)
        except OSError as error:
            self._socket.close()
            raise DecoderStartError(str(error)) from error
        try:
            self._socket.settimeout(START_S)
            if self._socket.recv(len(READY)) != READY:
                raise ConnectionError("it ended")
            self._socket.setblocking(False)
        except OSError as error:
            raise DecoderStartError(f"{error}; exit code {self.end()}") from None

    def _start(self, theirs: socket.socket, memory_bytes: int) -> subprocess.Popen[bytes]:
        # Without the environment, which holds passwords of brokers.
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(_LIBRARY), environment.get("PYTHONPATH")))
        )
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "epd_common.decoding.child", str(memory_bytes)],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ask(self, data: bytes, max_pixels: int, timeout_s: float) -> dict[str, Any]:
        """What it says of a file.

        Raises:
            TimeoutError: it said nothing in time.
            OSError, ValueError: it is gone, or says nonsense.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s + GRACE_S):
            await loop.sock_sendall(self._socket, HEAD.pack(len(data), max_pixels, timeout_s))
            await loop.sock_sendall(self._socket, data)
            found = json.loads(await self._read_answer())
        if not isinstance(found, dict):
            raise ValueError("the answer is none")
        return found

    async def _read_answer(self) -> bytes:
        loop = asyncio.get_running_loop()
        answer = b""
        size = ANSWER.size
        while len(answer) < size:
            piece = await loop.sock_recv(self._socket, ANSWER.size + MAX_ANSWER_BYTES)
            if not piece:
                raise ConnectionError("it ended")
            answer += piece
            if len(answer) >= ANSWER.size:
                size = ANSWER.size + ANSWER.unpack_from(answer)[0]
                if size > ANSWER.size + MAX_ANSWER_BYTES:
                    raise ValueError("the answer is too long")
        return answer[ANSWER.size :]

    def end(self) -> int:
        """Kill it; its exit code, which is that of its own end if it has ended."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It ends by itself where it was told so by an alarm, or by its closed socket.
            return self._process.wait(0.05)
        self._process.kill()
        return self._process.wait()


_ALARMS = (-signal.SIGALRM, -signal.SIGPROF)

_LIBRARY = Path(epd_common.__file__).resolve().parent.parent


class DecoderPool:
    """Decodes in processes that are started when they are needed.

    Args:
        memory_bytes: What a process may take beside what it has once it is started.
        timeout_s: For one file, by the clock, at most.
    """

    def __init__(self, *, memory_bytes: int, timeout_s: float) -> None:
        self._memory_bytes = memory_bytes
        self._timeout_s = timeout_s
        self._idle: list[_Process] = []
        self._closed = False

    @property
    def idle_pids(self) -> list[int]:
        """Process ids of those that wait for a file."""
        return [process.pid for process in self._idle]

    async def decode(self, data: bytes, max_pixels: int) -> Picture:
        """Decode one picture. It must not be cancelled: who waits no longer leaves it to end by itself.

        Raises:
            TooComplexError, TooManyPixelsError, CorruptError: see
                :func:`epd_common.decoding.pictures.decode`.
            DecodeMemoryError, DecodeTimeoutError, DecoderDiedError: a limit, or the process's end.
            DecoderStartError: there is no process that could be asked.
        """
        process = await self._take()
        try:
            found = await process.ask(data, max_pixels, self._timeout_s)
            picture = _read_answer(found)
        except (CorruptError, TooComplexError, TooManyPixelsError):
            await self._give_back(process)
            raise
        except BaseException as error:
            code = await asyncio.to_thread(process.end)
            if isinstance(error, TimeoutError) or code in _ALARMS:
                raise DecodeTimeoutError from None
            if isinstance(error, DecodeMemoryError) or not isinstance(error, OSError | ValueError):
                raise
            raise DecoderDiedError(f"exit code {code}") from None
        await self._give_back(process)
        return picture

    async def close(self) -> None:
        """End all that wait; those at work end with their file."""
        self._closed = True
        idle, self._idle = self._idle, []
        for process in idle:
            await asyncio.to_thread(process.end)

    async def _take(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            await asyncio.to_thread(process.end)  # the kernel took it while it waited
        return await asyncio.to_thread(_Process, self._memory_bytes)

    async def _give_back(self, process: _Process) -> None:
        if self._closed:
            await asyncio.to_thread(process.end)
        else:
            self._idle.append(process)


def _read_answer(found: dict[str, Any]) -> Picture:
    match found:
        case {"fault": "pixels", "text": str(text)}:
            raise TooManyPixelsError(text[:40])
        case {"fault": "complex", "text": str(text)}:
            raise TooComplexError(text[:100])
        case {"fault": "corrupt", "text": str(text)}:
            raise CorruptError(text[:200])
        case {"fault": "memory"}:
            raise DecodeMemoryError
        case {"content_type": str(content_type), "width": int(width), "height": int(height)}:
            return Picture(content_type, width, height)
    raise ValueError("the answer is none")
