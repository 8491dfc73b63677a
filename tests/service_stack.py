"""The three services in the test's own event loop, on real brokers, with engines that need no model."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from epd_cli.brokers import Brokers
from epd_common.bus import Bus, Registry
from epd_common.engines import EncoderEngine, PdEngine
from epd_common.health import ask_health
from epd_common.ingest.data_uri import make_data_uri
from epd_common.login import NatsLogin
from epd_common.protocol.keys import digest, embedding_key
from epd_common.protocol.subjects import inbox_prefix
from epd_common.store import Arena, open_redis
from epd_encoder.service import EncoderService
from epd_encoder.settings import EncoderSettings
from epd_gateway.service import serve
from epd_gateway.settings import GatewaySettings
from epd_pd.service import PdService
from epd_pd.settings import PdSettings
from fake_engine import FakeEncoderEngine, FakePdEngine

BOUND_S = 10.0
CHAT = "/v1/chat/completions"

_shades = itertools.count(1)


def picture(size: tuple[int, int] = (8, 8)) -> bytes:
    """A small PNG that no other call has given."""
    buffer = io.BytesIO()
    number = next(_shades)
    colour = (number & 255, number >> 8 & 255, secrets.randbelow(256))
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": make_data_uri(data)}}


def request_body(model: str, text: str, *pictures: bytes, **fields: Any) -> dict[str, Any]:
    parts = [image_part(data) for data in pictures] + [{"type": "text", "text": text}]
    return {"model": model, "messages": [{"role": "user", "content": parts}], **fields}


def broken_part() -> dict[str, Any]:
    """A picture whose header is right and whose rest is missing."""
    cut = base64.b64encode(picture()[:40]).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{cut}"}}


async def eventually(
    check: Callable[[], bool | Awaitable[bool]], what: str, within_s: float = BOUND_S
) -> float:
    """Wait until ``check`` is true; seconds that took. It looks again and again, for a bounded time."""
    started = time.monotonic()
    while True:
        found = check()
        if found if isinstance(found, bool) else await found:
            return time.monotonic() - started
        if time.monotonic() - started > within_s:
            raise AssertionError(f"{what}: not within {within_s} s")
        await asyncio.sleep(0.005)


class Process:
    """A service's task, which ``stop`` ends the way SIGTERM ends the process."""

    def __init__(
        self, name: str, run: Callable[[asyncio.Event], Coroutine[Any, Any, None]]
    ) -> None:
        self._stop = asyncio.Event()
        self.task = asyncio.create_task(run(self._stop), name=name)
        # How a process ends is seen by who looks; asyncio's word on it would come in the middle of anything.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def terminate(self) -> None:
        self._stop.set()

    async def stop(self) -> None:
        self.terminate()
        await asyncio.wait((self.task,), timeout=BOUND_S)
        if not self.task.done():
            stands = io.StringIO()
            for task in asyncio.all_tasks():
                task.print_stack(file=stands)
            self.task.cancel()
            raise AssertionError(
                f"{self.task.get_name()} did not stop within {BOUND_S} s:\n{stands.getvalue()}"
            )
        self.task.result()


@dataclass(slots=True)
class Worker:
    """A running encoder or PD worker."""

    id: str
    process: Process
    arena: Path
    engines: list[Any] = field(default_factory=list)

    @property
    def engine(self) -> Any:
        return self.engines[-1]

    @property
    def pinned(self) -> list[str]:
        return sorted(path.name for path in (self.arena / "pins" / self.id).iterdir())


class ServiceStack:
    """Services of one model of their own. Made by :func:`service_stack`."""

    def __init__(
        self,
        stack: AsyncExitStack,
        nats_url: str,
        redis_url: str,
        folder: Path,
        by_role: Brokers | None = None,
        login: NatsLogin = NatsLogin(),  # noqa: B008 - it is frozen
        settings: dict[str, Any] | None = None,
    ) -> None:
        self._stack = stack
        self._folder = folder
        self._by_role = by_role
        self._login = login
        self._brokers = {"nats_url": nats_url, "redis_url": redis_url}
        self._settings = self._brokers | (settings or {})
        self.model = f"fake/{secrets.token_hex(6)}"
        self.fingerprint = secrets.token_hex(32)
        self.encoders: list[Worker] = []
        self.pds: list[Worker] = []
        self.gateway: Process
        self.gateway_id = ""
        self.bus: Bus
        self.redis: Any
        self.registry: Registry
        self.http: httpx.AsyncClient

    # -- starting and stopping -------------------------------------------------------------------

    async def open(self) -> None:
        enter = self._stack.enter_async_context
        self.bus = await enter(
            Bus(
                self._brokers["nats_url"],
                name="test",
                login=self._login,
                inbox=inbox_prefix("operator"),
            )
        )
        self.redis = await enter(open_redis(self._brokers["redis_url"]))

    async def add_encoder(self, arena: str = "arena", **settings: Any) -> Worker:
        folder = self._folder / arena
        worker = Worker(secrets.token_hex(4), None, folder)  # type: ignore[arg-type]
        built = EncoderSettings(**{**self._worker_settings(worker, "encoder"), **settings})

        def make_engine(staging: Path) -> EncoderEngine:
            worker.engines.append(self.encoder_engine(built, staging))
            return worker.engine  # type: ignore[no-any-return]

        worker.process = self._run("encoder", EncoderService(built, make_engine).run)
        self.encoders.append(worker)
        return worker

    async def add_pd(self, arena: str = "arena", **settings: Any) -> Worker:
        folder = self._folder / arena
        worker = Worker(secrets.token_hex(4), None, folder)  # type: ignore[arg-type]
        built = PdSettings(**{**self._worker_settings(worker, "pd"), **settings})

        def make_engine(arena: Arena) -> PdEngine:
            worker.engines.append(self.pd_engine(built, arena))
            return worker.engine  # type: ignore[no-any-return]

        worker.process = self._run("pd", PdService(built, make_engine).run)
        self.pds.append(worker)
        return worker

    def encoder_engine(self, settings: EncoderSettings, staging: Path) -> EncoderEngine:
        return FakeEncoderEngine(self.model, self.fingerprint, staging)

    def pd_engine(self, settings: PdSettings, arena: Arena) -> PdEngine:
        encodes = settings.ec_role == "ec_both" or settings.local_encode == "always"
        return FakePdEngine(self.model, self.fingerprint, arena, encodes=encodes)

    async def add_gateway(self, **settings: Any) -> None:
        """The gateway that all of this asks: a further one takes the place of the one before."""
        self.gateway_id = secrets.token_hex(4)
        built = GatewaySettings(
            **{
                **self._urls("gateway"),
                "worker_id": self.gateway_id,
                "port": 0,
                "heartbeat_s": 0.5,
                "drain_notice_s": 0,
                **settings,
            },
        )
        self.gateway = self._run("gateway", lambda stop: serve(built, stop))
        self.registry = await self._stack.enter_async_context(Registry(self.bus))
        await self._until(lambda: bool(self.gateway_url), "the gateway is registered")
        self.http = await self._stack.enter_async_context(
            httpx.AsyncClient(base_url=self.gateway_url, timeout=BOUND_S)
        )

    def _urls(self, role: str) -> dict[str, Any]:
        if self._by_role is None:
            return self._settings
        nats, redis = self._by_role.nats, self._by_role.redis
        return {"nats_url": nats.url_for(role), "redis_url": redis.url_for(role)}

    def _worker_settings(self, worker: Worker, role: str) -> dict[str, Any]:
        return {
            **self._urls(role),
            "model": self.model,
            "worker_id": worker.id,
            "arena_dir": worker.arena,
            "heartbeat_s": 0.5,
        }

    def _run(self, name: str, run: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> Process:
        process = Process(name, run)

        async def end() -> None:
            if not process.task.done():
                await process.stop()

        self._stack.push_async_callback(end)
        return process

    @property
    def gateway_url(self) -> str:
        views = self.registry.workers("gateway")
        return next((v.record.phase for v in views if v.record.worker == self.gateway_id), "")

    async def _until(self, check: Callable[[], bool | Awaitable[bool]], what: str) -> None:
        """As :func:`eventually`, and it ends at once with the error of a service that failed."""

        async def checked() -> bool:
            for process in self._processes():
                if process.task.done():
                    process.task.result()
            found = check()
            return found if isinstance(found, bool) else await found

        await eventually(checked, what)

    def _processes(self) -> list[Process]:
        return [*(worker.process for worker in (*self.encoders, *self.pds)), self.gateway]

    async def ready(self) -> None:
        """Return when the gateway, too, sees every worker that runs as ready."""

        async def all_seen() -> bool:
            seen = {v.record.worker for v in self.registry.workers(model=self.model) if v.ready}
            if not seen.issuperset(worker.id for worker in (*self.encoders, *self.pds)):
                return False
            if self.encoders:
                return (await self.http.get("/ready")).status_code == 200 and await self.listed()
            return await self.listed()

        await self._until(all_seen, "the stack is ready")

    async def listed(self) -> bool:
        return (await self.http.get(f"/v1/models/{self.model}")).status_code == 200

    # -- asking ----------------------------------------------------------------------------------

    def body(self, text: str, *pictures: bytes, **fields: Any) -> dict[str, Any]:
        return request_body(self.model, text, *pictures, **fields)

    async def ask(self, text: str, *pictures: bytes, **fields: Any) -> httpx.Response:
        return await self.http.post(CHAT, json=self.body(text, *pictures, **fields))

    @contextlib.asynccontextmanager
    async def streaming(
        self, text: str, *pictures: bytes, **fields: Any
    ) -> AsyncIterator[httpx.Response]:
        body = self.body(text, *pictures, stream=True, **fields)
        async with self.http.stream("POST", CHAT, json=body) as response:
            yield response

    # -- looking ---------------------------------------------------------------------------------

    def key(self, data: bytes) -> str:
        return embedding_key(media_digest=digest(data), fingerprint=self.fingerprint)

    async def counters(self, worker: Worker) -> dict[str, int]:
        health: Any = await ask_health(self.bus, worker.id)
        return dict(health["counters"])

    async def busy(self, worker: Worker) -> int:
        health: Any = await ask_health(self.bus, worker.id)
        return int(health["busy"])

    async def forget(self, data: bytes, *, arena: bool = True, redis: bool = True) -> None:
        """Evict an embedding from stores while the key's state says that it is ready."""
        key = self.key(data)
        if arena:
            for folder in {worker.arena for worker in (*self.encoders, *self.pds)}:
                (folder / "data" / key).unlink(missing_ok=True)
        if redis:
            await self.redis.delete(f"epd:v1:emb:{key}")

    async def forget_state(self, data: bytes) -> None:
        await self.redis.delete(f"epd:v1:state:{self.key(data)}")


@contextlib.asynccontextmanager
async def service_stack(
    nats_url: str, redis_url: str, folder: Path, *, encoders: int = 1, pds: int = 1
) -> AsyncIterator[ServiceStack]:
    """A gateway with workers, all with their default settings, ready."""
    async with bare_stack(nats_url, redis_url, folder) as stack:
        for _ in range(encoders):
            await stack.add_encoder()
        for _ in range(pds):
            await stack.add_pd()
        await stack.add_gateway()
        await stack.ready()
        yield stack


@contextlib.asynccontextmanager
async def bare_stack(
    nats_url: str, redis_url: str, folder: Path, **options: Any
) -> AsyncIterator[ServiceStack]:
    """Nothing but connections; the test adds services.

    Args:
        options: ``by_role``: brokers on which services have their roles' rights. ``login``: of the test's own
            connection. ``settings``: of all services.
    """
    async with AsyncExitStack() as stack:
        made = ServiceStack(stack, nats_url, redis_url, folder, **options)
        await made.open()
        yield made


def text_of(response: httpx.Response) -> str:
    """The text of an answer that is no stream."""
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def stream_text(raw: str) -> str:
    """The text of a whole stream, which must end with its mark."""
    events = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert events[-1] == "[DONE]", events
    chunks = [json.loads(event) for event in events[:-1]]
    assert not any("error" in chunk for chunk in chunks), chunks
    return "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
