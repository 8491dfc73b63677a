"""One connection to Valkey that many commands share, sent without waiting.

redis-py gives each command a connection of its own for as long as it takes, which costs several times what
the command itself does: a lock, a task and two timers. Valkey answers the commands of a connection in their
order, so a queue is enough to tell whose answer one is; and commands that come together are sent together.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from typing import Any, cast

import hiredis
import redis.exceptions
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection

from epd_common.tasks import end

SHARED_BYTES = 1 << 20
"""A command with a larger argument has a connection of its own, so that others do not wait behind it."""

_SHARED = frozenset(
    ("DEL", "EVALSHA", "EXISTS", "EXPIRE", "HGETALL", "HMGET", "HSET", "SET", "STRLEN")
)
"""Commands that are done at once and whose answers are short."""

_PACKED = frozenset((bytes, float, int, str))
"""Types of arguments that hiredis packs."""


class SharedConnection:
    """Sends commands in turn over a connection that is made when it is needed, and anew after it broke.

    Args:
        pool: Knows how to connect.
        timeout_s: So long an answer may take after the one before it; then the connection is given up.
    """

    def __init__(self, pool: ConnectionPool, *, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._unsent: list[tuple[bytes, asyncio.Future[Any]]] = []
        self._unanswered: deque[asyncio.Future[Any]] = deque()
        self._to_send = asyncio.Event()
        self._to_read = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """That one, and those whose connections are being closed."""

    async def ask(self, args: tuple[Any, ...]) -> Any:
        """The answer to a command.

        Raises:
            redis.exceptions.ConnectionError: none came. The command may have been done all the same.
            redis.exceptions.ResponseError: Valkey refused it.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unsent.append((hiredis.pack_command(args), answer))
        self._to_send.set()
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve(), name="shared Valkey connection")
            self._tasks.add(self._serving)
            self._serving.add_done_callback(self._tasks.discard)
        return await answer

    async def close(self) -> None:
        await end(*self._tasks)

    async def _serve(self) -> None:
        """Until the connection breaks, which ends all that was asked by an error."""
        connection: AbstractConnection | None = None
        failure: Exception = redis.exceptions.ConnectionError("the connection was closed")
        try:
            connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
            connection.socket_timeout = None  # answers are waited for here
            connection.health_check_interval = 0
            async with asyncio.timeout(self._timeout_s):
                await connection.connect()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send(connection))
                group.create_task(self._read(connection))
        except* (redis.exceptions.RedisError, OSError, TimeoutError) as errors:
            failure = redis.exceptions.ConnectionError(str(errors.exceptions[0]))
        finally:
            self._serving = None  # who asks from now on asks another one
            asked = [*self._unanswered, *(answer for _, answer in self._unsent)]
            self._unanswered.clear()
            self._unsent.clear()
            for answer in asked:
                if not answer.done():
                    answer.set_exception(failure)
            if connection is not None:
                with contextlib.suppress(redis.exceptions.RedisError, OSError):
                    await connection.disconnect(nowait=True)

    async def _send(self, connection: AbstractConnection) -> None:
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            chunks: list[bytes] = []
            for command, answer in self._unsent:
                chunks.append(command)
                self._unanswered.append(answer)
            self._unsent.clear()
            self._to_read.set()
            await connection.send_packed_command(chunks, check_health=False)

    async def _read(self, connection: AbstractConnection) -> None:
        while True:
            while not self._unanswered:
                self._to_read.clear()
                await self._to_read.wait()
            try:
                async with asyncio.timeout(self._timeout_s):
                    found = await connection.read_response(disable_decoding=True)
            except redis.exceptions.ResponseError as error:
                answer = self._unanswered.popleft()
                if not answer.done():
                    answer.set_exception(error)
            else:
                answer = self._unanswered.popleft()
                if not answer.done():  # else who asked was cancelled
                    answer.set_result(found)


class SharingRedis(Redis):
    """redis-py's client, whose short commands share a connection. Those that get no answer there are sent
    once more as redis-py does it, with its pauses and new connections.

    Args:
        pool: For all other commands; it is closed with the client.
        timeout_s: See :class:`SharedConnection`.
    """

    def __init__(self, pool: ConnectionPool, *, timeout_s: float) -> None:
        super().__init__(connection_pool=pool)
        self.auto_close_connection_pool = True
        self._shared = SharedConnection(pool, timeout_s=timeout_s)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] not in _SHARED or not all(map(_is_short, args)):
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        try:
            found = await self._shared.ask(args)
        except redis.exceptions.ConnectionError:
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        options.pop("keys", None)
        if (convert := self.response_callbacks.get(args[0])) is not None:
            found = convert(found, **options)
            return await found if inspect.isawaitable(found) else found
        return found

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await self._shared.close()
        await super().aclose(close_connection_pool)


def _is_short(arg: object) -> bool:
    kind = type(arg)
    return kind in _PACKED and (kind is not bytes or len(cast(bytes, arg)) <= SHARED_BYTES)
