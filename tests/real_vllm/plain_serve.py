"""Plain ``vllm serve`` with the arena as connector, and vLLM's own example proxy in front."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from deployment import SMALL_MODEL, START_TIMEOUT_S

from bench import vllm_source
from epd_cli.server_process import dying_with_parent
from epd_common.client import CHAT

NAME = "plain"
WAIT_S = 4.0
QUOTA_BYTES = 400_000
"""About 32 of the small model's larger pictures."""

_ENGINE = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"),
    *("--kv-cache-memory-bytes", "33554432", "--distributed-executor-backend", "uni"),
    *("--limit-mm-per-prompt", '{"image": 8, "video": 0}', "--disable-uvicorn-access-log"),
    *("--served-model-name", NAME, "--enable-request-id-headers"),
)
_ROLES = {
    "ec_producer": ("--no-enable-prefix-caching",),
    "ec_consumer": ("--enable-mm-embeds",),
}

Part = dict[str, Any]


class Server:
    """One HTTP server as a child process, on a free port of the loopback address."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.log_path = folder / f"{name}.log"
        self._command = [*command, "--host", "127.0.0.1", "--port", str(self._port)]
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Server:
        with self.log_path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *dying_with_parent(self._command),
                stdout=log,
                stderr=log,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await self.healthy():
                    if self._process.returncode is not None:
                        raise RuntimeError(f"it ended:\n{self.log()[-3000:]}")
                    await asyncio.sleep(0.2)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), 20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    async def healthy(self) -> bool:
        """vLLM's answer is 503 once its engine is dead."""
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(base_url=self.url, timeout=10) as client:
                return (await client.get("/health")).status_code == 200
        return False

    async def chat(self, content: list[Part], **options: Any) -> httpx.Response:
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 24,
            "temperature": 0,
            **options,
        }
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            return await client.post(CHAT, json=body)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


@dataclass(frozen=True, slots=True)
class PlainServe:
    """An encoder, a PD server and the proxy; the arena is theirs alone."""

    encoder: Server
    pd: Server
    proxy: Server
    arena: Path

    async def encode(self, picture: Part, uuid: str) -> Part:
        """Have the encoder publish a picture; the part that stands for it at the PD server."""
        answer = await self.encoder.chat([{**picture, "uuid": uuid}])
        assert answer.status_code == 200, answer.text
        ((identifier, reported),) = answer.json()["ec_transfer_params"].items()
        assert identifier == uuid
        return {"type": "image_embeds", "image_embeds": reported["metadata"], "uuid": uuid}

    async def encode_new(self, picture: Part, uuid: str) -> tuple[Part, Path]:
        """The same for a picture that is not in the arena yet, and the file that it became."""
        before = self.files()
        part = await self.encode(picture, uuid)
        (file,) = self.files() - before
        return part, file

    async def new_file(self, before: set[Path]) -> Path:
        """Wait for the next embedding."""
        async with asyncio.timeout(30):
            while True:
                if new := self.files() - before:
                    (file,) = new
                    return file
                await asyncio.sleep(0.01)

    def files(self) -> set[Path]:
        return set((self.arena / "data").iterdir())

    def pinned(self) -> list[Path]:
        return [path for path in (self.arena / "pins").glob("*/*") if path.is_file()]


@contextlib.asynccontextmanager
async def plain_serve(folder: Path) -> AsyncIterator[PlainServe]:
    proxy_program = await asyncio.to_thread(_proxy, folder)
    arena = Path("/dev/shm") / f"epdflow-plain-{os.getpid()}"
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, arena, ignore_errors=True)
        engines = [Server(role, _vllm(role, arena), folder) for role in _ROLES]
        starting = [asyncio.ensure_future(stack.enter_async_context(each)) for each in engines]
        try:
            encoder, pd = await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        command = [sys.executable, str(proxy_program)]
        command += ["--encode-servers-urls", encoder.url, "--decode-servers-urls", pd.url]
        proxy = await stack.enter_async_context(Server("proxy", command, folder))
        yield PlainServe(encoder, pd, proxy, arena)


def _proxy(folder: Path) -> Path:
    """vLLM's example proxy as it is in the source distribution of the vLLM that runs here."""
    version = vllm_source.installed_version()
    return vllm_source.extract(version, vllm_source.PROXY, folder, report=print)


def _vllm(role: str, arena: Path) -> list[str]:
    transfer = {
        "ec_connector": "ArenaConnector",
        "ec_connector_module_path": "epd_vllm.drop_in",
        "ec_role": role,
        "ec_connector_extra_config": {
            "arena_dir": str(arena),
            "arena_bytes": QUOTA_BYTES,
            "wait_s": WAIT_S,
        },
    }
    command = [sys.executable, "-m", "epd_vllm.serve", str(SMALL_MODEL), *_ENGINE, *_ROLES[role]]
    return [*command, "--ec-transfer-config", json.dumps(transfer)]
