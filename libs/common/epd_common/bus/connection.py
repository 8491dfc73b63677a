"""One NATS connection with the limits and error messages that the services rely on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from epd_common.errors import BusyError, LoginRefusedError, TooLargeError, UnavailableError
from epd_common.login import NatsLogin, nats_servers
from epd_common.protocol.base import Message
from epd_common.protocol.codec import encode
from epd_common.tasks import end

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
PUBLISH_TIMEOUT_S = 5.0
STORE_TIMEOUT_S, STORE_AGAIN_S = 10.0, 0.2
"""A message for a stream is sent again and again for so long while its servers choose a leader, which takes
them 4 to 9 s; its id makes that one message."""

PING_INTERVAL_S, PINGS_MISSED = 5, 2
"""A connection that answers no more is made anew after this many pings."""

LOOK_S = 0.25
"""Seconds between looks at whether a connection is still the one that something was sent on."""

HEADER_ROOM_BYTES = 4096
"""Part of the payload limit kept free for headers, in bytes."""

_MSGS_EXCEEDED = 10077  # JetStream: maximum messages exceeded (discard=new)
_BYTES_EXCEEDED = 10122
_NO_PEERS = 10005  # as long as some servers of a cluster have not come


class _Stored(msgspec.Struct):
    """What JetStream answers to a message for a stream."""

    seq: int = 0
    error: dict[str, Any] | None = None


_read_stored = msgspec.json.Decoder(_Stored).decode


class _Client(Client):  # type: ignore[misc]  # nats-py is untyped
    """nats-py's client, which by itself sends the password in clear where a server does not ask for TLS."""

    def __init__(self, *, insists_on_tls: bool) -> None:
        super().__init__()
        self._insists_on_tls = insists_on_tls
        self.direct: dict[int, Callable[[str, bytes], None]] = {}
        """What is called for the messages of a subscription, by its number."""

    def _connect_command(self) -> bytes:
        if self._insists_on_tls and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        command: bytes = super()._connect_command()
        return command

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        if (handler := self.direct.get(sid)) is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            handler(subject.decode(), data)
        except Exception:  # else the connection would read no more
            logger.exception("a message of %s could not be handled", subject.decode())


class Bus:
    """An open connection. Use as an async context manager; leaving it drains.

    A broker that goes away is reconnected to for ever; meanwhile publishing raises
    :class:`~epd_common.errors.UnavailableError`.

    Args:
        url: One server's, or several of a cluster with commas between them.
        inbox: What the subjects begin with on which this connection is answered.
        connect_within_s: Seconds to try to connect for.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        login: NatsLogin = NatsLogin(),  # noqa: B008 - it is frozen
        inbox: str = "_INBOX",
        connect_within_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self._connect_within_s = connect_within_s
        self._servers = nats_servers(url)
        self._name = name
        self._login = login
        self._inbox = inbox
        insists_on_tls = login.ca is not None or "tls://" in url
        self._client = _Client(insists_on_tls=insists_on_tls)
        self._closing = False
        self._last_error = ""
        self._refused = asyncio.Event()
        self.lost = asyncio.Event()
        """Set when the connection was closed for good and nobody asked for it: the process should end."""
        self._connected_once = False
        self._marks: dict[int, asyncio.Future[None]] = {}
        self._marks_subject = f"{inbox}.mark.{secrets.token_hex(12)}"
        self._numbers = itertools.count()
        self.js: JetStreamContext = self._client.jetstream()

    @property
    def client(self) -> Client:
        """The nats-py client, for what this class does not wrap."""
        return self._client

    @property
    def connected(self) -> bool:
        return bool(self._client.is_connected)

    @property
    def reconnects(self) -> int:
        """How often the connection was made anew. What the server kept for the old one (pulls, watches)
        may be gone, without a word."""
        return int(self._client.stats["reconnects"])

    @property
    def max_payload_bytes(self) -> int:
        """Largest message body this bus takes, with room left for headers."""
        return int(self._client.max_payload) - HEADER_ROOM_BYTES

    async def __aenter__(self) -> Self:
        connecting = asyncio.ensure_future(
            self._client.connect(
                **_pool(self._servers, self._login.password()),
                name=self._name,
                tls=self._login.tls(),
                user_credentials=_text(self._login.creds),
                nkeys_seed=_text(self._login.nkey_seed_file),
                inbox_prefix=self._inbox,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.2,
                connect_timeout=2,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=PINGS_MISSED,
                allow_reconnect=True,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnect,
                reconnected_cb=self._on_reconnect,
                closed_cb=self._on_closed,
                # Requests that fail while disconnected must fail, not pile up.
                pending_size=8 * 1024 * 1024,
            )
        )
        refused = asyncio.ensure_future(self._refused.wait())
        try:
            # connect() can hang on a half-open socket, and tries a wrong password again and again.
            await asyncio.wait(
                (connecting, refused),
                timeout=self._connect_within_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not connecting.done():
                raise TimeoutError
            await connecting
        except (OSError, TimeoutError, nats.errors.Error) as error:
            await end(connecting)
            self._closing = True
            await self._client.close()
            reason = self._last_error or str(error) or type(error).__name__
            if self._refused.is_set():
                raise LoginRefusedError(
                    f"cannot connect to NATS at {self.address} ({reason}): are the user, the password and "
                    "what is said of TLS in its URL (EPD_NATS_URL, or --nats) right?",
                    code="nats_unavailable",
                ) from error
            raise UnavailableError(
                f"cannot connect to NATS at {self.address} ({reason}): is the server running, and is "
                "its URL (EPD_NATS_URL, or --nats) right?",
                code="nats_unavailable",
            ) from error
        finally:
            await end(refused)
        self._connected_once = True
        self.js = self._client.jetstream(timeout=PUBLISH_TIMEOUT_S)
        await self._client.subscribe(self._marks_subject, cb=self._on_mark)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing = True
        if self._client.is_connected:
            try:
                await asyncio.wait_for(self._client.drain(), 5)
                return
            except (TimeoutError, nats.errors.Error) as error:
                logger.warning("NATS did not drain: %s", str(error) or type(error).__name__)
        await self._client.close()

    @property
    def address(self) -> str:
        """The servers' addresses without credentials."""
        found = [urlsplit(server) for server in self._servers]
        return ", ".join(f"{parts.hostname}:{parts.port or 4222}" for parts in found)

    async def emit(self, subject: str, message: Message) -> None:
        """Publish on core NATS: at most once, to whoever listens now."""
        await self.emit_bytes(subject, encode(message))

    async def emit_bytes(self, subject: str, data: bytes, reply: str = "") -> None:
        try:
            await self._client.publish(subject, data, reply=reply)
        except nats.errors.MaxPayloadError as error:
            raise _too_large(len(data), self.max_payload_bytes) from error
        except nats.errors.Error as error:
            raise _unavailable(error) from error

    async def store(
        self, subject: str, message: Message, *, message_id: str, traceparent: str = ""
    ) -> int:
        """Publish into a stream and wait for its acknowledgement; the message's number in the stream.

        Args:
            message_id: Sent as ``Nats-Msg-Id``; the stream drops a second message with the same id.
            traceparent: Sent as the header of that name, unless empty.

        Raises:
            TooLargeError: over the bus limit, found before anything is sent.
            BusyError: the queue is full.
            UnavailableError: no acknowledgement. The message may have been stored all the same.
        """
        data = encode(message)
        if len(data) > self.max_payload_bytes:
            raise _too_large(len(data), self.max_payload_bytes)
        # With one server there is nobody else who could take it soon.
        within_s = STORE_TIMEOUT_S if len(self._servers) > 1 else 0.0
        give_up = time.monotonic() + within_s
        headers = {"Nats-Msg-Id": message_id}
        if traceparent:
            headers["traceparent"] = traceparent
        while True:
            try:
                answer = await self._client.request(
                    subject, data, timeout=PUBLISH_TIMEOUT_S, headers=headers
                )
                stored = _read_stored(answer.data)
                if stored.error is not None:
                    raise nats.js.errors.APIError.from_error(stored.error)
                return stored.seq
            except (nats.errors.Error, TimeoutError) as error:
                if getattr(error, "err_code", None) in (_MSGS_EXCEEDED, _BYTES_EXCEEDED):
                    raise BusyError(
                        f"the queue of {subject} is full; try again shortly",
                        code="queue_full",
                        retry_after_s=1.0,
                    ) from error
                if not no_leader(error) or time.monotonic() >= give_up:
                    raise _unavailable(error) from error
            await asyncio.sleep(STORE_AGAIN_S)

    async def subscribe(
        self,
        subject: str,
        handler: Callable[[Msg], Awaitable[None]],
        *,
        queue: str = "",
        **limits: int,
    ) -> Subscription:
        """Call ``handler`` for each message of ``subject``.

        Args:
            queue: Of all who subscribe with this name one gets each message.
        """
        return await self._client.subscribe(subject, queue=queue, cb=handler, **limits)

    @contextlib.asynccontextmanager
    async def listening(
        self, subject: str, handler: Callable[[Msg], Awaitable[None]], *, queue: str = ""
    ) -> AsyncIterator[None]:
        """As :meth:`subscribe`, for as long as the context is open."""
        subscription = await self.subscribe(subject, handler, queue=queue)
        try:
            yield
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    @contextlib.asynccontextmanager
    async def hearing(
        self, subject: str, handler: Callable[[str, bytes], None]
    ) -> AsyncIterator[None]:
        """Call ``handler`` with subject and data of each message, right where it is read: for what comes so
        often that a queue, and a task's turn, for each would cost more than what is done with it."""
        subscription = await self._client.subscribe(subject)
        self._client.direct[subscription._id] = handler
        try:
            yield
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()
            del self._client.direct[subscription._id]

    async def flush(self) -> None:
        """Return when the server has seen all that was sent, subscriptions included.

        A server handles what a connection sends in its order, so a message to oneself comes back when all
        before it was handled. The client's own ``flush`` would do, if its connection did not stop reading for
        good when the answer comes to a caller that was cancelled, or gave up, meanwhile.
        """
        number = next(self._numbers)
        passed = self._marks[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                while not passed.done():  # a mark is lost with the connection that it was sent on
                    connection = self.reconnects
                    await self._client.publish(self._marks_subject, str(number).encode())
                    while self.reconnects == connection and not passed.done():
                        await asyncio.wait((passed,), timeout=LOOK_S)
        except (nats.errors.Error, TimeoutError) as error:
            raise _unavailable(error) from error
        finally:
            del self._marks[number]

    async def _on_mark(self, message: Msg) -> None:
        passed = self._marks.get(int(message.data))
        if passed is not None and not passed.done():
            passed.set_result(None)

    async def _on_error(self, error: Exception) -> None:
        if self._refused.is_set():
            return  # what follows is only the server closing the connection
        self._last_error = str(error) or type(error).__name__
        if "authorization" in self._last_error.lower() or isinstance(
            error, ssl.SSLError | nats.errors.SecureConnWantedError
        ):
            self._refused.set()
        if self._connected_once:  # until then the caller hears of it, once
            logger.warning("NATS: %s", self._last_error)

    async def _on_disconnect(self) -> None:
        if self._connected_once and not self._closing:
            logger.warning("NATS: disconnected from %s", self.address)

    async def _on_closed(self) -> None:
        if self._connected_once and not self._closing:
            logger.error("NATS: the server ended the connection for good (%s)", self._last_error)
            self.lost.set()

    async def _on_reconnect(self) -> None:
        logger.info("NATS: reconnected to %s", self.address)


def no_leader(error: Exception) -> bool:
    """Whether JetStream only lacks servers, or one to decide, now: as while a cluster chooses a leader."""
    return getattr(error, "err_code", None) == _NO_PEERS or isinstance(
        error,
        TimeoutError
        | nats.errors.NoRespondersError
        | nats.js.errors.NoStreamResponseError
        | nats.js.errors.ServiceUnavailableError,
    )


def _pool(servers: list[str], password_given: str | None = None) -> dict[str, Any]:
    """The servers, and apart from them the login that they share.

    Servers that are not named here, of which the client hears from the others, are then tried with it, too.
    """
    urls = [urlsplit(server) for server in servers]
    logins = {(url.username, url.password) for url in urls}
    user, password = logins.pop()
    if logins or user is None:
        return {"servers": servers}
    bare = [url._replace(netloc=url.netloc.rpartition("@")[2]).geturl() for url in urls]
    if password_given is not None:
        return {"servers": bare, "user": user, "password": password_given}
    if password is None:
        return {"servers": bare, "token": user}
    return {"servers": bare, "user": user, "password": password}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _too_large(size: int, limit: int) -> TooLargeError:
    return TooLargeError(
        f"the message has {size} bytes, the bus takes {limit}; put the body or the media into the "
        "media store and send a reference",
        code="message_too_large",
    )


def _unavailable(error: Exception) -> UnavailableError:
    return UnavailableError(
        f"NATS did not take the message ({str(error) or type(error).__name__}); try again",
        code="nats_unavailable",
        retry_after_s=1.0,
    )
