"""The systems of a comparison, each started as one whole and ended without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from bench.baseline import vllm_server
from bench.vllm_source import PROXY, extract
from epd_bench.processes import cpu_seconds
from epd_bench.target import Reading
from epd_cli.bench import LocalStack
from epd_cli.server_process import dying_with_parent
from epd_cli.stack import StackOptions, read_state, run_stack
from epd_common.errors import EpdError

SERVED_MODEL = "sim"
"""The name that all systems answer to."""

START_S = 60.0
_POLL_S = 0.05
_STOP_S = 10.0


class SystemStartError(EpdError):
    """A process of a system did not come up; the text holds the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is the same for all systems of a comparison.

    Attributes:
        model: A folder with a model for real vLLM; without one engines are simulated.
        encoders: With 0 of them, PD workers encode as well.
        prefill_pds: Of the system ``epd``, whose PD workers have roles: so many prefill, and
            ``decode_pds`` decode.
        time_scale: All simulated times are multiplied by it.
        slow_encoder: The first encoder takes so many times as long.
        max_num_seqs: Sequences that a PD worker's engine runs at once.
        decodes: Encoders decode pictures, as real ones do.
        vllm_version: Whose proxy it is.
        dynamic: The proxy watches its servers, which register with it, instead of taking them for granted.
    """

    model: str = ""
    encoders: int = 2
    pds: int = 2
    prefill_pds: int = 1
    decode_pds: int = 1
    profile: str = "qwen2.5-vl-7b-h100"
    time_scale: float = 1.0
    slow_encoder: float = 1.0
    max_num_seqs: int = 64
    decodes: bool = True
    arena_bytes: int = 2 << 30
    vllm_version: str = "0.32.0"
    dynamic: bool = False

    @property
    def start_s(self) -> float:
        """How long a process may take to start."""
        return vllm_server.START_S if self.model else START_S


@dataclass(slots=True)
class System:
    """A system that runs.

    Attributes:
        url: One, or several with commas, which are asked in turn.
        pids: By role.
        counts: Asks the stages for what they have counted.
    """

    name: str
    url: str
    pids: dict[str, list[int]]
    counts: Callable[[], Awaitable[dict[str, int]]]

    async def read(self) -> Reading:
        """CPU by role, and what the stages counted."""
        return Reading(cpu_s=cpu_seconds(self.pids), counts=await self.counts())

    def kill_encoder(self) -> None:
        """End the first encoder as a crash does; nothing starts it again."""
        os.kill(self.pids["encoder"][0], signal.SIGKILL)


@contextlib.asynccontextmanager
async def ours(shape: Shape) -> AsyncIterator[System]:
    """This project: gateway, encoders, PD workers, NATS and Valkey."""
    async with _ours(shape, "ours", pds=shape.pds) as system:
        yield system


@contextlib.asynccontextmanager
async def three_stages(shape: Shape) -> AsyncIterator[System]:
    """The same, with workers of their own for prefill and for decode."""
    async with _ours(shape, "epd", prefills=shape.prefill_pds, decodes=shape.decode_pds) as system:
        yield system


@contextlib.asynccontextmanager
async def _ours(
    shape: Shape, name: str, *, pds: int = 0, prefills: int = 0, decodes: int = 0
) -> AsyncIterator[System]:
    environment = {
        "EPD_SIM_PROFILE": shape.profile,
        "EPD_SIM_TIME_SCALE": str(shape.time_scale),
        "EPD_SIM_DECODE": str(shape.decodes).lower(),
        "EPD_MAX_NUM_SEQS": str(shape.max_num_seqs),
        "EPD_ENGINE_ARGS": f"--max-num-seqs {shape.max_num_seqs}",
        "EPD_PD_SLOTS": str(2 * shape.max_num_seqs),
        "EPD_ARENA_BYTES": str(shape.arena_bytes),
        "EPD_LOG_LEVEL": "warning",
    }
    if shape.slow_encoder != 1:
        environment["EPD_SIM_FAULT_WORKERS"] = "encoder-1"
        environment["EPD_SIM_SLOW_FACTOR"] = str(shape.slow_encoder)
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as folder:
        options = StackOptions(
            engine="vllm" if shape.model else "sim",
            model=shape.model or "sim",
            served_model=SERVED_MODEL,
            encoders=shape.encoders,
            pds=pds,
            prefills=prefills,
            decodes=decodes,
            port=0,
            state_dir=Path(folder),
            environment=environment,
        )
        async with run_stack(options, lambda view: None) as stack:
            state = read_state(Path(folder))
            pids: dict[str, list[int]] = {}
            for service in stack.services:
                pids.setdefault(service.role, []).append(service.pid)
            for broker in stack.brokers:
                pids.setdefault(broker.name.lower(), []).append(broker.pid)
            looked = LocalStack(state)

            async def counts() -> dict[str, int]:
                return (await looked.read()).counts

            yield System(name, stack.gateway_url, pids, counts)


@contextlib.asynccontextmanager
async def vllm_proxy(shape: Shape) -> AsyncIterator[System]:
    """vLLM's example proxy, and encoders and PD servers behind it."""
    async with _servers(shape) as servers:
        for number in range(shape.encoders):
            slow = shape.slow_encoder if number == 0 else 1.0
            await servers.start("encoder", f"encoder-{number + 1}", slow)
        for number in range(shape.pds):
            await servers.start("pd", f"pd-{number + 1}", 1.0)
        urls = {role: await servers.urls(role) for role in ("encoder", "pd")}
        proxy = await asyncio.to_thread(extract, shape.vllm_version, PROXY, servers.folder)
        url = await servers.start_proxy(proxy, urls, dynamic=shape.dynamic)
        yield System("proxy", url, servers.pids, servers.counts)


@contextlib.asynccontextmanager
async def colocated(shape: Shape) -> AsyncIterator[System]:
    """Servers that encode and decode on one device each, as many as the others have workers."""
    async with _servers(shape) as servers:
        for number in range(shape.encoders + shape.pds):
            slow = shape.slow_encoder if number == 0 else 1.0
            await servers.start("colocated", f"colocated-{number + 1}", slow)
        yield System(
            "colocated", ",".join(await servers.urls("colocated")), servers.pids, servers.counts
        )


SYSTEMS = {"ours": ours, "epd": three_stages, "proxy": vllm_proxy, "colocated": colocated}


@contextlib.asynccontextmanager
async def _servers(shape: Shape) -> AsyncIterator[_Servers]:
    arena = Path(tempfile.mkdtemp(prefix="epd-baseline-", dir="/dev/shm"))
    folder = Path(tempfile.mkdtemp(prefix="epd-baseline-"))
    try:
        async with AsyncExitStack() as stack, aiohttp.ClientSession() as http:
            yield _Servers(shape, arena, folder, stack, http)
    finally:
        shutil.rmtree(arena, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """For programs that take no socket; somebody else may take the port first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(slots=True)
class _Servers:
    """The processes of a baseline."""

    shape: Shape
    arena: Path
    folder: Path
    stack: AsyncExitStack
    http: aiohttp.ClientSession
    pids: dict[str, list[int]] = field(default_factory=dict)
    _started: list[tuple[str, str, asyncio.subprocess.Process]] = field(default_factory=list)
    _urls: dict[str, list[str]] = field(default_factory=dict)

    async def start(self, role: str, name: str, slow_factor: float) -> None:
        shape = self.shape
        if shape.model:
            port = free_port()
            command = vllm_server.serve_command(
                shape.model,
                role,
                name=SERVED_MODEL,
                files=self.arena,
                port=port,
                max_num_seqs=shape.max_num_seqs,
            )
            await self._run(role, name, command[1:])
            await asyncio.to_thread((self.folder / f"{name}.port").write_text, str(port))
            return
        await self._run(
            role,
            name,
            [
                *("-m", "bench.baseline.sim_server", "--role", role, "--name", name),
                *("--arena", str(self.arena), "--arena-bytes", str(shape.arena_bytes)),
                *("--port-file", str(self.folder / f"{name}.port")),
                *("--profile", shape.profile, "--time-scale", str(shape.time_scale)),
                *("--slow-factor", str(slow_factor), "--max-num-seqs", str(shape.max_num_seqs)),
                *(() if shape.decodes else ("--no-decode",)),
            ],
        )

    async def start_proxy(self, proxy: Path, urls: dict[str, list[str]], *, dynamic: bool) -> str:
        port = free_port()
        listen = ["--host", "127.0.0.1", "--port", str(port)]
        static = ["--encode-servers-urls", ",".join(urls["encoder"])]
        static += ["--decode-servers-urls", ",".join(urls["pd"])]
        process = await self._run(
            "proxy",
            "proxy",
            [str(proxy), *listen, *(["--dynamic-registration"] if dynamic else static)],
        )
        url = f"http://127.0.0.1:{port}"
        await self._until("proxy", process, lambda: self._answers(url))
        if dynamic:
            for role, theirs in (("encode", urls["encoder"]), ("prefill_decode", urls["pd"])):
                for server in theirs:
                    await self._register(url, role, server)
        return url

    async def urls(self, role: str) -> list[str]:
        """The addresses of all servers of a role, once they answer."""
        for started, name, process in self._started:
            if started == role:
                await self._until(name, process, lambda name=name: self._has_port(name))  # type: ignore[misc]
                port = await asyncio.to_thread((self.folder / f"{name}.port").read_text)
                self._urls.setdefault(role, []).append(f"http://127.0.0.1:{port}")
        return self._urls[role]

    async def counts(self) -> dict[str, int]:
        """What all servers that live have counted; real vLLM's do not."""
        total: dict[str, int] = {}
        if self.shape.model:
            return total
        for url in (url for urls in self._urls.values() for url in urls):
            with contextlib.suppress(aiohttp.ClientError):
                async with self.http.get(f"{url}/counts") as response:
                    for name, count in (await response.json()).items():
                        total[name] = total.get(name, 0) + count
        return total

    async def _run(self, role: str, name: str, arguments: list[str]) -> asyncio.subprocess.Process:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *dying_with_parent([sys.executable, *arguments]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "ADMIN_API_KEY": _ADMIN_KEY},
                start_new_session=True,
            )
        self.stack.push_async_callback(_end, process)
        self._started.append((role, name, process))
        self.pids.setdefault(role, []).append(process.pid)
        return process

    async def _until(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        check: Callable[[], Awaitable[bool]],
    ) -> None:
        give_up = time.monotonic() + self.shape.start_s
        while not await check():
            if process.returncode is not None or time.monotonic() > give_up:
                log = await asyncio.to_thread((self.folder / f"{name}.log").read_text)
                raise SystemStartError(f"{name} did not start:\n{log[-2000:]}")
            await asyncio.sleep(_POLL_S)

    async def _has_port(self, name: str) -> bool:
        path = self.folder / f"{name}.port"
        if not await asyncio.to_thread(path.exists):
            return False
        return await self._answers(f"http://127.0.0.1:{await asyncio.to_thread(path.read_text)}")

    async def _answers(self, url: str) -> bool:
        try:
            async with self.http.get(f"{url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def _register(self, proxy: str, role: str, url: str) -> None:
        async with self.http.post(
            f"{proxy}/instances",
            json={"role": role, "url": url},
            headers={"x-api-key": _ADMIN_KEY},
        ) as response:
            response.raise_for_status()


_ADMIN_KEY = "of-this-run"


async def _end(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_S)
            return
