"""Reading large values from Valkey or Redis, from the socket straight into memory that is used again.

redis-py gathers a value in a buffer of its own, copies it into an object, and takes new memory for both; of a
value of some MB most of the time goes there. It is still what connects, signs in and speaks TLS here.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import redis.asyncio.connection
import redis.exceptions
from redis.asyncio import Redis

from epd_common.store.embedding import IntegrityError

READERS = 8
"""Threads of one process that read, each over a connection of its own; further reads wait."""

_AHEAD = 2
"""Values that are asked for at a time: the server sends the next one while this one is used."""

_LONGEST_LINE_BYTES = 4096
_SETTINGS = ("host", "port", "path", "db", "username", "password", "credential_provider")
_SETTINGS_FROM = ("ssl_", "socket_timeout", "socket_connect_timeout")

T = TypeVar("T")
Values = Iterator[memoryview | None]


class BulkReader:
    """Reads values in threads, as copying out of the kernel takes milliseconds; other threads run meanwhile.

    Args:
        redis: Whose address, login, TLS and time-outs are used.
        most_bytes: Of one value.
    """

    def __init__(self, redis: Redis, *, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._connections: Any = _like(redis)  # redis-py's pools have no types
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="bulk-reader")
        self._own = threading.local()

    async def aclose(self) -> None:
        """End reads that are under way, with an error, and the connections."""
        self._connections.disconnect()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._connections.disconnect()  # of a read that was about to begin

    async def read(self, names: Sequence[str], *, ttl_s: int, take: Callable[[Values], T]) -> T:
        """Read values, renew their time to live, and have ``take`` use them in order, in a thread.

        A value is a view that holds until the next one is asked for; None: nothing has that name.

        Raises:
            IntegrityError: a value is larger than ``most_bytes``.
            redis.exceptions.RedisError: the server refuses, or does not answer.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._read, names, ttl_s, take)

    def _read(self, names: Sequence[str], ttl_s: int, take: Callable[[Values], T]) -> T:
        with contextlib.closing(self._values(names, ttl_s)) as values:
            return take(values)

    def _values(self, names: Sequence[str], ttl_s: int) -> Generator[memoryview | None, None, None]:
        connection = self._connections.get_connection()
        try:
            for number in range(len(names)):
                # Not all at once: what is not read yet the server must hold.
                for name in names[0 if number == 0 else number + _AHEAD - 1 : number + _AHEAD]:
                    connection.send_command("GETEX", name, "EX", ttl_s, check_health=False)
                yield self._value(_socket(connection), names[number])
        except OSError as error:
            connection.disconnect()
            raise redis.exceptions.ConnectionError(str(error) or type(error).__name__) from error
        except BaseException:
            # GeneratorExit, too: answers that nobody will read are on their way.
            connection.disconnect()
            raise
        finally:
            self._connections.release(connection)

    def _value(self, connected: socket.socket, name: str) -> memoryview | None:
        """The next answer, which must be a bulk string: ``$SIZE``, or ``$-1`` for none."""
        line = _line(connected)
        if line.startswith(b"-"):
            raise _refusal(line[1:].decode(errors="replace"))
        if not line.startswith(b"$"):
            raise redis.exceptions.InvalidResponse(f"expected a value, got {line[:40]!r}")
        size = int(line[1:])
        if size < 0:
            return None
        if size > self._most_bytes:
            raise IntegrityError(f"{name} has {size} bytes, more than {self._most_bytes}")
        memory = self._memory()
        _fill(connected, memory[: size + 2])  # a line's end is behind it
        return memory[:size]

    def _memory(self) -> memoryview:
        """This thread's; all values that it reads lie there, one after the other."""
        if not hasattr(self._own, "memory"):
            self._own.memory = memoryview(bytearray(self._most_bytes + 2))
        memory: memoryview = self._own.memory
        return memory


def _like(client: Redis) -> Any:
    """Connections for threads to where an asyncio client connects, as it does."""
    pool = client.connection_pool
    settings: dict[str, Any] = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if name in _SETTINGS or name.startswith(_SETTINGS_FROM)
    }
    kind: Any = redis.Connection
    if issubclass(pool.connection_class, redis.asyncio.connection.UnixDomainSocketConnection):
        kind = redis.UnixDomainSocketConnection
    elif issubclass(pool.connection_class, redis.asyncio.connection.SSLConnection):
        kind = redis.SSLConnection
    # Protocol 2 has no messages that nobody asked for.
    pool_class: Any = redis.BlockingConnectionPool
    return pool_class(max_connections=READERS, connection_class=kind, protocol=2, **settings)


def _socket(connection: Any) -> socket.socket:
    """The connection's own, which redis-py does not show. It has read each answer whole, so nothing that we
    could miss lies in its buffers."""
    found: socket.socket = connection._sock
    return found


def _fill(connected: socket.socket, memory: memoryview) -> None:
    while memory.nbytes:
        received = connected.recv_into(memory)
        if not received:
            raise ConnectionResetError("the server closed the connection")
        memory = memory[received:]


def _line(connected: socket.socket) -> bytes:
    """A line without its end. Byte by byte, as what comes behind it goes elsewhere; it has some ten bytes."""
    line = bytearray()
    one = memoryview(bytearray(1))
    while not line.endswith(b"\r\n"):
        _fill(connected, one)
        line += one
        if len(line) > _LONGEST_LINE_BYTES:
            raise redis.exceptions.InvalidResponse("an answer that does not end")
    return bytes(line[:-2])


def _refusal(text: str) -> redis.exceptions.RedisError:
    if text.startswith("NOPERM"):
        return redis.exceptions.NoPermissionError(text)
    return redis.exceptions.ResponseError(text)
