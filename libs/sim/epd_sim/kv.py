"""Prompts that a simulated engine has prefilled for others: kept in its memory, read once, over TCP.

What is read is what the answer shows of the prompt's items, so an answer whose prompt was loaded is right
only if it was this prompt that was loaded. As with NIXL, what is read is given up by who kept it, and so is
what nobody reads within its lease; and it dies with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Any

import msgspec

from epd_common.engines import KvLostError

READ_S = 1.0
"""A kept prompt that is not read within this is held for lost."""


class KeptPrompts:
    """Keeps prompts for others. Start it before use.

    Args:
        host: Address to listen on, and ``port``; 0 takes a free one.
        lease_s: So long a prompt is kept.
    """

    def __init__(self, *, host: str, port: int, lease_s: float) -> None:
        self._host = host
        self._port = port
        self._lease_s = lease_s
        self._kept: dict[str, tuple[float, list[bytes]]] = {}
        self._server: asyncio.Server | None = None

    def __len__(self) -> int:
        """Prompts that are kept."""
        now = time.monotonic()
        return sum(until > now for until, _ in self._kept.values())

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, self._host, self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._kept.clear()

    def keep(self, signatures: list[bytes]) -> dict[str, Any]:
        """Keep a prompt; what another engine needs to read it."""
        now, name = time.monotonic(), secrets.token_hex(8)
        self._kept = {each: kept for each, kept in self._kept.items() if kept[0] > now}
        self._kept[name] = now + self._lease_s, signatures
        return {"host": self._host, "port": self._port, "name": name}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            OSError, EOFError, ValueError, asyncio.LimitOverrunError, TimeoutError
        ):
            async with asyncio.timeout(READ_S):
                name = (await reader.readuntil(b"\n")).decode().strip()
                until, signatures = self._kept.pop(name, (0.0, []))
                if until > time.monotonic():
                    writer.write(msgspec.msgpack.encode(signatures))
                    await writer.drain()
        writer.close()


async def read_kept(params: dict[str, Any]) -> list[bytes]:
    """Read what another engine keeps, which then gives it up.

    Raises:
        KvLostError: it is not there any more, or its engine is not.
    """
    try:
        async with asyncio.timeout(READ_S):
            reader, writer = await asyncio.open_connection(params["host"], params["port"])
            try:
                writer.write(f"{params['name']}\n".encode())
                raw = await reader.read()  # to its end, in however many pieces it comes
            finally:
                writer.close()
        return msgspec.msgpack.decode(raw, type=list[bytes])
    except (OSError, TimeoutError, KeyError, TypeError, msgspec.DecodeError) as error:
        raise KvLostError(
            f"the prompt's keys and values could not be read ({error or type(error).__name__})"
        ) from error
