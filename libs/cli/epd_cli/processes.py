"""The services as child processes: started with their settings, restarted when they die, ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from epd_cli.server_process import dying_with_parent

DRAIN_S = 30.0
"""What a service takes for its drain where EPD_DRAIN_S is not set."""

CLOSE_S = 20.0
"""What it may take beyond its drain."""

LOG_TAIL_LINES = 15

_MODULES = {"gateway": "epd_gateway", "encoder": "epd_encoder", "pd": "epd_pd"}


class ServiceProcess:
    """One service process.

    Args:
        role: ``gateway``, ``encoder`` or ``pd``.
        worker_id: Its name in the registry; a restarted process keeps it.
        environment: ``EPD_*`` settings.
    """

    def __init__(
        self, role: str, worker_id: str, environment: dict[str, str], log_path: Path
    ) -> None:
        log_path.unlink(missing_ok=True)  # of an earlier run
        self.role = role
        self.worker_id = worker_id
        self.log_path = log_path
        self._environment = environment
        self._stop_timeout_s = CLOSE_S + sum(
            _seconds({**os.environ, **environment}.get(name, ""), default_s)
            for name, default_s in (("EPD_DRAIN_S", DRAIN_S), ("EPD_DRAIN_NOTICE_S", 0.0))
        )
        self._process: asyncio.subprocess.Process | None = None

    def keep_port(self, port: str) -> None:
        """Take the same port again when it is started again."""
        self._environment = {**self._environment, "EPD_PORT": port}

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def returncode(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        command = dying_with_parent([sys.executable, "-m", _MODULES[self.role]])
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment, "EPD_WORKER_ID": self.worker_id},
                start_new_session=True,  # Ctrl-C is for the parent, which stops its children in order
            )

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def stop(self, *, at_once: bool = False) -> None:
        """SIGTERM, then a bounded wait, then SIGKILL for it and what it started.

        Args:
            at_once: Without the wait, for a process that has taken no work yet.
        """
        if self._process is None:
            return
        if not at_once:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), self._stop_timeout_s)
        self.end_children()
        await self._process.wait()

    def end_children(self) -> None:
        """End it, and what it started and left behind: vLLM's own processes, which hold a GPU's memory."""
        if self._process is not None:
            # They are in the session that start_new_session made.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        """The last lines of its log."""
        with contextlib.suppress(OSError):
            lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            return "\n".join(f"    {line}" for line in lines)
        return ""


def _seconds(text: str, default_s: float) -> float:
    """A setting's seconds; the service itself says what is wrong with one that is none."""
    try:
        return float(text)
    except ValueError:
        return default_s
