"""Real deployments: epdflow on one model, and the same model in a plain vLLM server beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from epd_cli.server_process import dying_with_parent
from epd_cli.stack import Stack, StackOptions, StackView, run_stack

ROOT = Path(__file__).resolve().parents[2]
SMALL_MODEL = ROOT / "models" / "shapes-qwen2vl"
START_TIMEOUT_S = 420
PATIENCE_S = 2.0
KV_LEASE_S = 8
MOST_WORKERS = 8
TOOL_ARGUMENTS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@dataclass(frozen=True, slots=True)
class Setup:
    """How the services of a deployment are set up."""

    encoders: int = 1
    pds: int = 1
    prefills: int = 0
    decodes: int = 0
    engine: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    metrics: bool = False
    store: str = "arena"


LITTLE_MEMORY = ("--max-model-len", "1024", "--num-gpu-blocks-override", "10")
SETUPS = {
    "e+pd": Setup(),
    "two of each": Setup(encoders=2, pds=2),
    "by prefix, little memory": Setup(
        pds=2, engine=LITTLE_MEMORY, environment={"EPD_PLACEMENT": "prefix"}
    ),
    "e+p+d": Setup(
        pds=0,
        prefills=2,
        decodes=2,
        environment={"EPD_SPLIT_TOKENS": "0", "EPD_KV_LEASE_S": str(KV_LEASE_S)},
        metrics=True,
    ),
    "nodes apart": Setup(store="nixl"),
    "little memory": Setup(engine=LITTLE_MEMORY),
    "both": Setup(encoders=0, metrics=True),
    "both, little memory": Setup(encoders=0, engine=LITTLE_MEMORY),
    "rescue": Setup(
        environment={"EPD_LOCAL_ENCODE": "always", "EPD_ENCODE_PATIENCE_S": str(PATIENCE_S)}
    ),
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """Two servers of one model that must answer alike."""

    name: str
    setup: str
    stack: Stack
    colocated_url: str
    metrics_port: int
    """Of the first worker, where its setup has it."""

    @property
    def url(self) -> str:
        return self.stack.gateway_url


class Deployments:
    """Starts deployments on demand, one at a time, since each takes memory and a minute."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current: Deployment | None = None
        self._services = contextlib.AsyncExitStack()
        self._colocated = contextlib.AsyncExitStack()

    async def get(self, name: str, setup: str = "e+pd") -> Deployment:
        """The running deployment of a model, which replaces another one."""
        current = self._current
        if current is None or (current.name, current.setup) != (name, setup):
            await self._services.aclose()
            if current is not None and current.name != name:
                await self._colocated.aclose()
                current = None
            self._current = None
            url = current.colocated_url if current is not None else ""
            self._current = await self._start(name, setup, url)
        return self._current

    async def stop(self) -> None:
        self._current = None
        await self._services.aclose()
        await self._colocated.aclose()

    async def _start(self, name: str, setup: str, colocated_url: str) -> Deployment:
        """Start what is missing, at the same time; ``colocated_url`` is that of one that runs already."""
        model = await self._checkpoint(name)
        metrics_port = free_ports(MOST_WORKERS) if SETUPS[setup].metrics else 0
        options = StackOptions(
            model=str(model),
            served_model=name,
            encoders=SETUPS[setup].encoders,
            pds=SETUPS[setup].pds,
            prefills=SETUPS[setup].prefills,
            decodes=SETUPS[setup].decodes,
            store=SETUPS[setup].store,
            port=0,
            state_dir=self._folder / name,
            environment={
                "EPD_ENGINE_ARGS": " ".join((*TOOL_ARGUMENTS, *SETUPS[setup].engine)),
                "EPD_METRICS_PORT": str(metrics_port),
                **SETUPS[setup].environment,
            },
        )
        async with asyncio.TaskGroup() as starting:
            if not colocated_url:
                server = colocated_server(model, name, self._folder)
                colocated = starting.create_task(self._colocated.enter_async_context(server))
            services = run_stack(options, _printer())
            stack = starting.create_task(self._services.enter_async_context(services))
        url = colocated_url or colocated.result()
        return Deployment(name, setup, stack.result(), url, metrics_port)

    async def _checkpoint(self, name: str) -> Path:
        """The trained model, or a random one that is built now."""
        if name == SMALL_MODEL.name:
            return SMALL_MODEL
        folder = self._folder / "models" / name
        command = ("-m", "models.tiny", "--arch", name, "--out", str(folder))
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL
        )
        assert await process.wait() == 0, f"cannot build a random {name}"
        return folder


def free_ports(count: int) -> int:
    """The first of so many in a row that were free just now; the system gives none of them to connections, so
    a worker that is started again finds its own."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        first = random.randrange(low // 2, low - count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def free_port() -> int:
    """One that was free just now."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def _printer() -> object:
    seen: set[str] = set()

    def report(view: StackView) -> None:
        for row in view.rows:
            line = " ".join(row).strip()
            if line not in seen:
                seen.add(line)
                print(f"[{view.elapsed_s:5.1f} s] {line}", flush=True)

    return report


@contextlib.asynccontextmanager
async def colocated_server(model: Path, name: str, folder: Path) -> AsyncIterator[str]:
    """A plain vLLM server with the vision tower, by its URL; its log is in ``folder``."""
    port_file = folder / f"colocated-{name}.port"
    port_file.unlink(missing_ok=True)
    log_path = folder / f"colocated-{name}.log"
    program = str(Path(__file__).with_name("colocated.py"))
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *dying_with_parent(
                [sys.executable, program, str(model), name, str(port_file), *TOOL_ARGUMENTS]
            ),
            stdout=log,
            stderr=log,
            env=dict(os.environ),
        )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not port_file.exists():
                if process.returncode is not None:
                    raise RuntimeError(
                        f"the colocated server ended:\n{log_path.read_text()[-3000:]}"
                    )
                await asyncio.sleep(0.1)
        yield f"http://127.0.0.1:{port_file.read_text()}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 20)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
