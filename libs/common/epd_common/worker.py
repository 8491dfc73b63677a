"""What encoder and PD processes have in common: registry record, engine start, the work loop, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from epd_common.accounts import Account
from epd_common.bus import Bus, Delivery, JobPuller, announce
from epd_common.bus.exhausted import OnExhausted
from epd_common.bus.micro import micro_service
from epd_common.engines import EngineInfo, Progress
from epd_common.errors import EpdError, UnavailableError, UpstreamError
from epd_common.lifecycle import wait_any
from epd_common.protocol import WorkerRecord, WorkerState
from epd_common.protocol.names import names_in
from epd_common.protocol.subjects import Stage
from epd_common.protocol.workers import Encodes, PdRole
from epd_common.settings import WorkerSettings
from epd_common.store import Arena
from epd_common.telemetry.logs import log_about
from epd_common.telemetry.worker_metrics import WorkerMetrics
from epd_common.watchdog import Watchdog

logger = logging.getLogger(__name__)

ENGINE_WATCH_S = 0.5
GIVE_BACK_DELAY_S = 0.1
UNEXPECTED_DELAY_S = 1.0
STEP_BACK_S, LONGEST_STEP_BACK_S = 1.0, 10.0
"""So long after a worker gave a job back for want of a broker or store it takes no other: others shall. Twice
as long each time, until it does one."""

BROKEN_DRAIN_S = 1.0
"""What a worker whose engine is dead gives its jobs to end by themselves."""

ENGINE_STOP_S = 15.0
"""An engine that does not stop within this is left behind; its processes end with the worker's."""

HEARTBEATS_MISSED = 3


Handle = Callable[[Delivery], Awaitable[None]]
"""Does one job and settles its delivery."""


class Engine(Protocol):
    """The part of an engine that every worker handles alike."""

    @property
    def alive(self) -> bool: ...

    @property
    def steps(self) -> int: ...

    @property
    def owes(self) -> bool: ...

    @property
    def batches(self) -> Mapping[int, int]: ...

    async def start(self, progress: Progress) -> EngineInfo: ...

    async def stop(self) -> None: ...


class Worker:
    """Keeps the process's record and micro service, and runs its jobs.

    Use as an async context manager; while it is open the worker is in the registry.

    Args:
        arena: This node's; the record says how full it is.
        slots: Jobs of its role that it takes at once.
        metrics: Show what is counted here.
    """

    def __init__(
        self,
        bus: Bus,
        settings: WorkerSettings,
        arena: Arena,
        *,
        role: Literal["encoder", "pd"],
        slots: int,
        metrics: WorkerMetrics,
        pd_role: PdRole = "pd",
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._arena = arena
        self._role = role
        self._pd_role: PdRole = pd_role
        self._slots = slots
        self._encodes: Encodes = "no"
        self._state: WorkerState = "starting"
        self._phase = ""
        self._info: EngineInfo | None = None
        self._engine: Engine | None = None
        self._ending: asyncio.Task[None] | None = None
        self._broken = asyncio.Event()
        self._failure = ""
        self._setbacks = 0
        self._pullers: list[JobPuller] = []
        self._jobs: dict[Stage, Account] = {}
        self._holdings: dict[str, Callable[[], dict[str, Any]]] = {}
        self._stack = AsyncExitStack()
        self._beat_now: Callable[[], None] = lambda: None
        self.counters: Counter[str] = Counter()
        self.metrics = metrics
        self._show()

    def _show(self) -> None:
        """Have the metrics read what is kept here and in the arena."""
        settings, arena, metrics = self._settings, self._arena, self.metrics
        who = settings.worker_id, settings.node, settings.model_name, settings.engine
        metrics.info.labels(*who, *((self._pd_role,) if self._role == "pd" else ())).set(1)
        metrics.show_counters(self.counters)
        metrics.show_state(lambda: self._state)
        store, node = metrics.store, settings.node
        store.evicted.read = lambda: {
            ("arena",): arena.evicted,
            ("nixl",): self.counters["nixl_evicted"],
            ("redis",): self.counters["redis_evicted"],
        }
        store.used.read = lambda: {(node,): arena.published_bytes()}
        store.quota.read = lambda: {(node,): arena.quota_bytes}

    def _show_engine(self, engine: Engine) -> None:
        self.metrics.steps.read = lambda: {(): engine.steps}
        self.metrics.owes.read = lambda: {(): float(engine.owes)}
        self.metrics.encode.batches.read = lambda: engine.batches

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
        self._show_engine(engine)
        self._info = await engine.start(progress)
        if self._info.encodes:
            self._encodes = "queue" if takes_encodes else "rescue"
        return self._info

    async def stop_engine(self) -> None:
        """Stop the engine, if it was started; one that does not end is not waited for long."""
        if self._engine is None:
            return
        if self._ending is None:  # who asks once more waits for the same end
            self._ending = asyncio.create_task(self._engine.stop(), name="engine stop")
        await asyncio.wait((self._ending,), timeout=ENGINE_STOP_S)
        if not self._ending.done():
            logger.error("the engine did not stop within %g s", ENGINE_STOP_S)
        elif (error := self._ending.exception()) is not None:
            logger.error("the engine did not stop in order", exc_info=error)

    async def work(
        self, queues: Sequence[tuple[JobPuller, Handle, OnExhausted]], stop: asyncio.Event
    ) -> None:
        """Take jobs until ``stop`` is set or the engine fails; then finish, or give back, what runs.

        Each queue comes with what does a job, and with what tells who waits for it that nobody will.

        Raises:
            UpstreamError: the engine died, or hung.
        """
        self._pullers = [puller for puller, _, _ in queues]
        for puller in self._pullers:
            self._show_stage(puller)
        self._set_state("ready")
        broken = self._broken
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch_engine(), name="engine watch")
            pulls = [
                group.create_task(self._pull(puller, handle, tell), name="pull")
                for puller, handle, tell in queues
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
            raise UpstreamError(f"{self._failure}; the process ends", stage=self._role)
        logger.info("drained; %d jobs were given back", self.counters["given_back"])

    async def _pull(self, puller: JobPuller, handle: Handle, tell: OnExhausted) -> None:
        """Run every job that comes in a task of its own; at the end they have ``drain_s`` to finish."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as bound, asyncio.TaskGroup() as jobs:
                async for delivery in puller.deliveries():
                    jobs.create_task(
                        self._run(puller, handle, tell, delivery), name=f"job {delivery.subject}"
                    )
                drain_s = BROKEN_DRAIN_S if self._broken.is_set() else self._settings.drain_s
                logger.info("draining %d jobs for %g s at most", puller.busy, drain_s)
                bound.reschedule(loop.time() + drain_s)
        except TimeoutError:
            logger.warning("jobs that did not finish within %g s were given back", drain_s)

    async def _run(
        self, puller: JobPuller, handle: Handle, tell: OnExhausted, delivery: Delivery
    ) -> None:
        """One job's boundary: whatever it raises ends here, with its delivery settled."""
        log_about(**names_in(delivery.data))  # in a task of its own
        entry = self._jobs[puller.stage].enter()
        stage = self.metrics.stages[puller.stage]
        try:
            with stage.job(published=delivery.published, attempt=delivery.attempt):
                await handle(delivery)
            self._setbacks = 0
        except asyncio.CancelledError:
            drained = UnavailableError(
                "the last of the workers that had this job was shut down before it was done; send it again",
                code="worker_stopped",
                stage=self._role,
                retry_after_s=1.0,
            )
            await self._give_back(delivery, drained, GIVE_BACK_DELAY_S, tell)
            raise
        except EpdError as error:
            logger.warning("job given back: %s", error, extra=error.fields())
            if isinstance(error, UnavailableError) and not puller.rests:
                step_back_s = min(STEP_BACK_S * 2**self._setbacks, LONGEST_STEP_BACK_S)
                puller.step_back(GIVE_BACK_DELAY_S + step_back_s)
                self._setbacks += 1
            await self._give_back(delivery, error, GIVE_BACK_DELAY_S, tell)
        except Exception as error:
            logger.exception("job failed by an unexpected error; given back")
            unexpected = EpdError(f"unexpected {type(error).__name__}; the worker's log says more")
            await self._give_back(delivery, unexpected, UNEXPECTED_DELAY_S, tell)
        finally:
            if self._engine is not None and not self._engine.alive:
                self._fail("died")  # at once, so that it takes no further job
            entry.end(delivery.outcome or "repeated")
            puller.release()

    async def _give_back(
        self, delivery: Delivery, error: EpdError, delay_s: float, tell: OnExhausted
    ) -> None:
        """Have the job done again; after the last attempt the queue would only keep it for ever."""
        self.counters["given_back"] += 1
        if delivery.last_attempt:
            try:
                await tell(delivery.data, error)
                await delivery.give_up(error)
                return
            except EpdError as failure:
                logger.warning("job could not be given up: %s", failure)
        await delivery.retry(delay_s)

    def _show_stage(self, puller: JobPuller) -> None:
        account = self._jobs.setdefault(puller.stage, Account())
        stage = self.metrics.stages[puller.stage]
        stage.show(account, slots=puller.slots, busy=lambda: puller.busy)

    async def _watch_engine(self) -> None:
        """Return when the engine has died, or was held for hung and was ended for that."""
        engine = self._engine
        assert engine is not None
        bound_s = self._settings.stall_s
        watchdog = Watchdog(bound_s=bound_s, longest_look_s=2 * ENGINE_WATCH_S)
        looked = time.monotonic()
        while engine.alive:
            await asyncio.sleep(ENGINE_WATCH_S)
            last, looked = looked, time.monotonic()
            if watchdog.look(steps=engine.steps, owes=engine.owes, since_last_s=looked - last):
                self._fail(f"computed nothing for {bound_s:g} s (EPD_STALL_S) though it had work")
                # Now its jobs fail, and the items among them count as begun and never ended.
                await self.stop_engine()
                return
        self._fail("died")

    def _fail(self, what: str) -> None:
        """The engine is of no use any more."""
        if not self._broken.is_set():
            self._failure = f"the {self._role}'s engine {what}"
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
            arena_used_bytes=self._arena.published_bytes(),
            arena_quota_bytes=self._arena.quota_bytes,
            encodes=self._encodes,
            pd_role=self._pd_role,
            pid=os.getpid(),
            phase=self._phase,
            error=self._failure,
            max_model_len=info.max_model_len if info else 0,
            max_item_rows=info.max_item_rows if info else 0,
            special_tokens=list(info.special_tokens) if info else [],
            special_token_ids=list(info.special_token_ids) if info else [],
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
            "jobs": {stage: account.report() for stage, account in self._jobs.items()},
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
            "steps": self._engine.steps if self._engine is not None else 0,
            "owes": self._engine is not None and self._engine.owes,
            "counters": dict(self.counters),
        }
