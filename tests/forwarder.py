"""A way between two processes that a test cuts, blocks and restores: TCP on the loopback interface."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from epd_common.tasks import end

_CHUNK = 1 << 16


class Forwarder:
    """Forwards connections to a port. Use as an async context manager."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._passing = asyncio.Event()
        self._passing.set()
        self._refuses = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        self.cut()
        await end(*self._tasks)

    def cut(self) -> None:
        """Every connection breaks, and new ones, too."""
        self._refuses = True
        for writer in list(self._writers):
            writer.transport.abort()

    def hang(self) -> None:
        """Nothing arrives any more, on either side, and nobody is told."""
        self._passing.clear()

    def restore(self) -> None:
        """What was held up arrives, and new connections are made."""
        self._refuses = False
        self._passing.set()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if self._refuses:
                return
            await self._passing.wait()
            their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(their_writer)
            try:
                there = asyncio.create_task(self._pump(reader, their_writer))
                back = asyncio.create_task(self._pump(their_reader, writer))
                try:
                    await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await end(there, back)
            finally:
                self._writers.discard(their_writer)
                their_writer.transport.abort()
        except OSError:
            pass  # the other side is away, which the client sees
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
