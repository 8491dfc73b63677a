"""What encoder and PD processes have in common: registry record, engine start, the work loop, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from redis.asyncio import Redis

from epd_common.bus import Bus, Delivery, JobPuller, announce, declare_consumers, declare_streams
from epd_common.bus.micro import micro_service
from epd_common.encode import Encoding
from epd_common.engines import EncoderEngine, EngineInfo, Progress
from epd_common.errors import EpdError, UnavailableError, UpstreamError
from epd_common.ledger import Ledger
from epd_common.lifecycle import wait_any
from epd_common.protocol import Locator, WorkerRecord, WorkerState, subjects
from epd_common.protocol.subjects import Stage
from epd_common.protocol.workers import Encodes
from epd_common.settings import WorkerSettings
from epd_common.store import (
    Arena,
    EmbeddingStore,
    KeyStates,
    MediaStore,
    RedisEmbeddingStore,
    open_redis,
)
from epd_common.store.arena import sweeping

logger = logging.getLogger(__name__)

ENGINE_WATCH_S = 0.5
GIVE_BACK_DELAY_S = 0.1
UNEXPECTED_DELAY_S = 1.0
HEARTBEATS_MISSED = 3


Handle = Callable[[Delivery], Awaitable[None]]
"""Does one job and settles its delivery."""


class Engine(Protocol):
    """The part of an engine that every worker handles alike."""

    @property
    def alive(self) -> bool: ...

    async def start(self, progress: Progress) -> EngineInfo: ...


class Worker:
    """Keeps the process's record and micro service, and runs its jobs.

    Use as an async context manager; while it is open the worker is in the registry.

    Args:
        slots: Jobs of its role that it takes at once.
    """

    def __init__(
        self, bus: Bus, settings: WorkerSettings, *, role: Literal["encoder", "pd"], slots: int
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._role = role
        self._slots = slots
        self._encodes: Encodes = "no"
        self._state: WorkerState = "starting"
        self._phase = ""
        self._info: EngineInfo | None = None
        self._engine: Engine | None = None
        self._broken = asyncio.Event()
        self._pullers: list[JobPuller] = []
        self._jobs: dict[Stage, Ledger] = {}
        self._holdings: dict[str, Callable[[], dict[str, Any]]] = {}
        self._stack = AsyncExitStack()
        self._beat_now: Callable[[], None] = lambda: None
        self.counters: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        every_s = self._settings.heartbeat_s
        await self._stack.enter_async_context(
            micro_service(
                self._bus,
                role=self._role,
                worker=self._settings.worker_id,
                health=self.health,
                audit=self.audit,
            )
        )
        self._beat_now = await self._stack.enter_async_context(
            announce(self._bus, self._record, every_s=every_s)
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def load(self, engine: Engine, *, takes_encodes: bool) -> EngineInfo:
        """Start the engine, showing its phases in the registry.

        Args:
            takes_encodes: It will take encode jobs.
        """
        loop = asyncio.get_running_loop()
        started = time.monotonic()

        def progress(phase: str) -> None:  # called from whatever thread loads
            logger.info(
                "engine: %s", phase, extra={"seconds": round(time.monotonic() - started, 1)}
            )
            loop.call_soon_threadsafe(self._set_phase, phase)

        self._engine = engine
        self._info = await engine.start(progress)
        if self._info.encodes:
            self._encodes = "queue" if takes_encodes else "rescue"
        return self._info

    async def work(self, queues: Sequence[tuple[JobPuller, Handle]], stop: asyncio.Event) -> None:
        """Take jobs until ``stop`` is set or the engine dies; then finish, or give back, what runs.

        Raises:
            UpstreamError: the engine died.
        """
        self._pullers = [puller for puller, _ in queues]
        self._set_state("ready")
        broken = self._broken
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch_engine(), name="engine watch")
            pulls = [
                group.create_task(self._pull(puller, handle), name="pull")
                for puller, handle in queues
            ]
            await wait_any(stop, broken, self._bus.lost)
            self._set_state("failed" if broken.is_set() else "draining")
            for puller in self._pullers:
                puller.stop()
            await asyncio.wait(pulls)
            watch.cancel()
        if self._bus.lost.is_set():
            raise UnavailableError("the connection to NATS is lost for good; the process ends")
        if broken.is_set():
            raise UpstreamError(
                f"the {self._role}'s engine died; the process ends", stage=self._role
            )

    async def _pull(self, puller: JobPuller, handle: Handle) -> None:
        """Run every job that comes in a task of its own; at the end they have ``drain_s`` to finish."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as bound, asyncio.TaskGroup() as jobs:
                async for delivery in puller.deliveries():
                    jobs.create_task(
                        self._run(puller, handle, delivery), name=f"job {delivery.subject}"
                    )
                logger.info("draining %d jobs", puller.busy)
                bound.reschedule(loop.time() + self._settings.drain_s)
        except TimeoutError:
            logger.warning("jobs that did not finish within EPD_DRAIN_S were given back")

    async def _run(self, puller: JobPuller, handle: Handle, delivery: Delivery) -> None:
        """One job's boundary: whatever it raises ends here, with its delivery settled."""
        entry = self._jobs.setdefault(puller.stage, Ledger()).enter()
        try:
            await handle(delivery)
        except asyncio.CancelledError:
            drained = UnavailableError("the worker was shut down before the job was done")
            await self._give_back(delivery, drained, GIVE_BACK_DELAY_S)
            raise
        except EpdError as error:
            logger.warning("job given back: %s", error, extra=error.fields())
            await self._give_back(delivery, error, GIVE_BACK_DELAY_S)
        except Exception as error:
            logger.exception("job failed by an unexpected error; given back")
            unexpected = EpdError(f"unexpected {type(error).__name__}; the worker's log says more")
            await self._give_back(delivery, unexpected, UNEXPECTED_DELAY_S)
        finally:
            if self._engine is not None and not self._engine.alive:
                self._broken.set()  # at once, so that it takes no further job
            entry.end(delivery.outcome or "repeated")
            puller.release()

    async def _give_back(self, delivery: Delivery, error: EpdError, delay_s: float) -> None:
        """Have the job done again; after the last attempt the queue would only keep it for ever."""
        if delivery.last_attempt:
            try:
                await delivery.give_up(error)
                return
            except EpdError as failure:
                logger.warning("job could not be given up: %s", failure)
        await delivery.retry(delay_s)

    async def _watch_engine(self) -> None:
        while self._engine is not None and self._engine.alive:  # noqa: ASYNC110 - vLLM has no event
            await asyncio.sleep(ENGINE_WATCH_S)
        self._broken.set()

    def _set_phase(self, phase: str) -> None:
        self._phase = phase
        self._beat_now()

    def _set_state(self, state: WorkerState) -> None:
        self._state = state
        logger.info("%s is %s", self._role, state)
        self._beat_now()

    @property
    def _busy(self) -> int:
        return sum(puller.busy for puller in self._pullers)

    def _record(self, beat: int) -> WorkerRecord:
        info = self._info
        return WorkerRecord(
            role=self._role,
            worker=self._settings.worker_id,
            node=self._settings.node,
            state=self._state,
            beat=beat,
            ttl_s=HEARTBEATS_MISSED * self._settings.heartbeat_s,
            model=self._settings.model_name,
            fingerprint=info.fingerprint if info else "",
            modalities=list(info.modalities) if info else [],
            slots=self._slots,
            busy=self._busy,
            encodes=self._encodes,
            pid=os.getpid(),
            phase=self._phase,
            max_model_len=info.max_model_len if info else 0,
            special_tokens=list(info.special_tokens) if info else [],
            versions=info.versions if info else {},
        )

    def shows(self, name: str, holding: Callable[[], dict[str, Any]]) -> None:
        """Have what some part of this process holds shown to audits."""
        self._holdings[name] = holding

    def audit(self) -> dict[str, Any]:
        """What came to this process, what became of it, and what it holds now."""
        return {
            "role": self._role,
            "node": self._settings.node,
            "pid": os.getpid(),
            "busy": {puller.stage: puller.busy for puller in self._pullers},
            "jobs": {stage: ledger.report() for stage, ledger in self._jobs.items()},
            **{name: holding() for name, holding in self._holdings.items()},
        }

    def health(self) -> dict[str, Any]:
        """What the micro service's health endpoint answers."""
        return {
            "ok": self._state == "ready",
            "state": self._state,
            "phase": self._phase,
            "busy": self._busy,
            "slots": self._slots,
            "counters": dict(self.counters),
        }


@dataclass(frozen=True, slots=True)
class Connections:
    """What a worker process works with, open as long as its stack is."""

    settings: WorkerSettings
    bus: Bus
    redis: Redis
    arena: Arena
    worker: Worker
    states: KeyStates
    media: MediaStore
    remote: list[EmbeddingStore]

    def encoding(self, engine: EncoderEngine, info: EngineInfo) -> Encoding:
        """Makes embeddings with this worker's engine."""
        return Encoding(
            bus=self.bus,
            engine=engine,
            info=info,
            arena=self.arena,
            remote=self.remote,
            locators=[
                Locator(store=name, node=self.settings.node if name == "arena" else "")
                for name in self.settings.stores
            ],
            media=self.media,
            states=self.states,
            worker=self.settings.worker_id,
            counters=self.worker.counters,
        )

    async def pull(self, stack: AsyncExitStack, stage: Stage, *, slots: int) -> JobPuller:
        """A puller of the model's queue, open as long as the stack is."""
        return await stack.enter_async_context(
            JobPuller(
                self.bus,
                stage,
                consumers=await declare_consumers(self.bus, stage, self.settings.model_name),
                slots=slots,
                worker=self.settings.worker_id,
            )
        )


async def connect(
    stack: AsyncExitStack,
    settings: WorkerSettings,
    *,
    role: Literal["encoder", "pd"],
    slots: int,
) -> Connections:
    """Connect to the brokers, open this node's arena, and enter the registry as ``starting``."""
    bus = await stack.enter_async_context(
        Bus(
            settings.nats_url,
            name=f"epd-{role} {settings.worker_id}",
            login=settings.nats_login(),
            inbox=subjects.inbox_prefix(role),
        )
    )
    redis = await stack.enter_async_context(open_redis(settings.redis_url, ca=settings.redis_ca))
    await declare_streams(
        bus,
        max_jobs=settings.queue_max_jobs,
        replicas=settings.nats_replicas,
        update=False,
    )
    arena = Arena(settings.arena_dir, quota_bytes=settings.arena_bytes, worker=settings.worker_id)
    arena.open()
    stack.callback(arena.close)
    await stack.enter_async_context(sweeping(arena))
    worker = await stack.enter_async_context(Worker(bus, settings, role=role, slots=slots))
    worker.shows("arena", arena.report)
    remote: list[EmbeddingStore] = []
    if "redis" in settings.stores:
        remote.append(RedisEmbeddingStore(redis, ttl_s=settings.embedding_ttl_s))
    return Connections(
        settings=settings,
        bus=bus,
        redis=redis,
        arena=arena,
        worker=worker,
        states=KeyStates(
            redis, lease_s=settings.encode_lease_s, ready_ttl_s=settings.embedding_ttl_s
        ),
        media=MediaStore(redis, ttl_s=settings.media_ttl_s),
        remote=remote,
    )
