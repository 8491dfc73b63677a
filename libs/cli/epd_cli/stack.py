"""Everything on one machine: embedded brokers (or given ones) and the services as children."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from epd_cli.backoff import Backoff
from epd_cli.broker_store import LOOK_S, StoreWatch, has_room, until_room
from epd_cli.brokers import Brokers, embedded_brokers
from epd_cli.connect import operator_bus
from epd_cli.processes import ServiceProcess
from epd_cli.server_process import ServerProcess
from epd_common.bus import Registry, WorkerView
from epd_common.errors import EpdError
from epd_common.protocol.workers import PdRole
from epd_common.tasks import end

START_TIMEOUT_S = 600.0
POLL_S = 0.1
ARENA_ROOT = Path("/dev/shm")
PD_ROLES = get_args(PdRole)
APART = {"nixl": "arena,nixl,redis", "redis": "arena,redis"}
"""Ways of embeddings between nodes, and what ``EPD_STORES`` is for each."""

_numbers = itertools.count(1)

Report = Callable[["StackView"], None]


class StackError(EpdError):
    """The stack did not come up; the text holds the end of the log that says why."""

    default_code = "start_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What to start.

    Attributes:
        model: Path or hub id.
        engine: ``vllm``, or ``sim``, which looks no model up.
        encoders: With 0, PD workers encode as well.
        prefills: PD workers that hand their prompts over, to so many ``decodes``.
        store: ``arena``: all workers share one, as on one node. ``nixl`` and ``redis``: each has a node and
            an arena of its own, as on several machines, and embeddings go from one to the other by that.
        nats_url: A NATS that runs already; empty starts one.
        redis_url: A Valkey or Redis that runs already; empty starts one.
        environment: More ``EPD_*`` settings for all services.
    """

    model: str
    engine: str = "vllm"
    served_model: str = ""
    encoders: int = 1
    pds: int = 1
    prefills: int = 0
    decodes: int = 0
    store: str = "arena"
    port: int = 8000
    nats_url: str = ""
    redis_url: str = ""
    state_dir: Path = Path(".epd")
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StackView:
    """What a progress display shows: one row a process, with its state and what it does."""

    rows: list[tuple[str, str, str]]
    elapsed_s: float


@dataclass(slots=True)
class Stack:
    """A stack that runs."""

    options: StackOptions
    nats_url: str
    redis_url: str
    gateway_url: str
    models: list[str]
    services: list[ServiceProcess]
    arena: Path
    brokers: list[ServerProcess]

    def write_state(self) -> Path:
        """Write ``state.json``, which other commands and people's scripts read."""
        path = self.options.state_dir / "state.json"
        state = {
            "gateway_url": self.gateway_url,
            "nats_url": self.nats_url,
            "redis_url": self.redis_url,
            "models": self.models,
            "processes": [
                {"role": service.role, "id": service.worker_id, "pid": service.pid}
                for service in self.services
            ],
        }
        temporary = path.with_suffix(".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:  # credentials inside: for this user only
            json.dump(state, file, indent=1)
        temporary.replace(path)
        return path

    async def supervise(self, stop: asyncio.Event, say: Callable[[str], None]) -> None:
        """Restart what dies, services and brokers, until ``stop`` is set.

        A service that dies again and again is started with growing pauses, and never given up: the others
        answer meanwhile. A broker that runs and says that it cannot write is restarted as well, once there
        is room.

        Raises:
            EpdError: something could not be started again.
        """

        async def keep_broker(broker: ServerProcess) -> None:
            while True:
                code = await broker.wait()
                say(f"{broker.name} ended (exit status {code}); starting it again at its address")
                await until_room(broker.name, broker.folder, say)
                await broker.start()

        async def keep_store(broker: ServerProcess) -> None:
            watch, told = StoreWatch(), False
            while True:
                await asyncio.sleep(LOOK_S)
                problem = await broker.problem() if broker.running else ""
                if problem and not has_room(broker.folder):
                    if not told:
                        say(
                            f"{broker.name} cannot write ({problem}); make room, and it is started anew"
                        )
                    told = True
                    continue
                told = told and bool(problem)
                if watch.look(problem, time.monotonic()):
                    say(f"{broker.name} is stopped, as it cannot write although it runs: {problem}")
                    await broker.stop()  # and its other keeper starts it

        async def keep(service: ServiceProcess) -> None:
            backoff = Backoff()
            while True:
                started = time.monotonic()
                code = await service.wait()
                service.end_children()
                pause_s = backoff.pause_s(time.monotonic() - started)
                say(
                    f"{service.worker_id} ended (exit status {code}); starting it again in {pause_s:g} s. "
                    f"Its log: {service.log_path}"
                )
                await asyncio.sleep(pause_s)
                await service.start()
                say(f"{service.worker_id} was started again (process {service.pid})")
                self.write_state()

        keepers = [asyncio.create_task(keep(s), name=f"keep {s.worker_id}") for s in self.services]
        keepers += [
            asyncio.create_task(keeper(broker), name=f"{keeper.__name__} {broker.name}")
            for broker in self.brokers
            for keeper in (keep_broker, keep_store)
        ]
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait((stopping, *keepers), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a keeper only ends by an error
        finally:
            await end(stopping, *keepers)


@contextlib.asynccontextmanager
async def run_stack(options: StackOptions, report: Report) -> AsyncIterator[Stack]:
    """Start everything, wait until it is ready, and stop it at the end of the context.

    Raises:
        StackError: a service ended or was not ready in time.
        epd_cli.brokers.BrokerError: a broker did not start.
    """
    logs = options.state_dir / "logs"
    state_path = options.state_dir / "state.json"
    async with contextlib.AsyncExitStack() as stack:
        report(StackView([("brokers", "starting", "")], 0.0))
        brokers = await stack.enter_async_context(
            embedded_brokers(
                options.state_dir / "brokers",
                nats=not options.nats_url,
                redis=not options.redis_url,
            )
        )
        logs.mkdir(mode=0o700, exist_ok=True)
        nats_url = options.nats_url or brokers.nats_url
        redis_url = options.redis_url or brokers.redis_url
        _sweep_arenas()
        arena = ARENA_ROOT / f"epdflow-{os.getpid()}-{next(_numbers)}"
        stack.callback(shutil.rmtree, arena, ignore_errors=True)
        # vLLM's sockets between its processes, which it leaves behind when it is killed.
        ipc = stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-ipc-", dir="/tmp"))
        services = _services(options, brokers, arena, logs, ipc)
        stack.callback(state_path.unlink, missing_ok=True)
        up: list[bool] = []  # filled once they take work
        stack.push_async_callback(_stop_all, services, up)
        for service in services:
            await service.start()
        bus = await stack.enter_async_context(operator_bus(nats_url, name="epd up"))
        registry = await stack.enter_async_context(Registry(bus))
        await _until_ready(services, registry, report)
        up.append(True)
        gateway = next(view.record for view in registry.workers("gateway") if view.ready)
        for service in services:
            service.keep_port(gateway.phase.rpartition(":")[2])  # clients know this one
        running = Stack(
            options,
            nats_url,
            redis_url,
            gateway.phase,
            registry.models(),
            services,
            arena,
            [b for b in (brokers.nats_or_none, brokers.redis_or_none) if b is not None],
        )
        running.write_state()
        yield running


def _services(
    options: StackOptions, brokers: Brokers, arena: Path, logs: Path, ipc: str
) -> list[ServiceProcess]:
    common = {
        "EPD_ENGINE": options.engine,
        "EPD_MODEL": options.model,
        "EPD_SERVED_MODEL": options.served_model,
        "EPD_PORT": str(options.port),
        "EPD_ARENA_DIR": str(arena),
        "EPD_STORES": os.environ.get("EPD_STORES", "arena"),  # one node
        "EPD_LOG_FORMAT": os.environ.get("EPD_LOG_FORMAT", "text"),
        # There is one gateway, so nothing to turn away to.
        "EPD_DRAIN_NOTICE_S": os.environ.get("EPD_DRAIN_NOTICE_S", "0"),
        "VLLM_RPC_BASE_PATH": ipc,
        **({} if options.encoders else {"EPD_EC_ROLE": "ec_both"}),
        **options.environment,
    }
    if options.store in APART:
        common["EPD_STORES"] = APART[options.store]
    metrics = metrics_ports({**os.environ, **options.environment})
    counts = (
        ("gateway", 1),
        ("encoder", options.encoders),
        ("pd", options.pds),
        ("prefill", options.prefills),
        ("decode", options.decodes),
    )
    services = []
    for kind, count in counts:
        role = "pd" if kind in PD_ROLES else kind
        for number in range(1, count + 1):
            own = {} if role == "gateway" else next(metrics)
            if role == "pd":
                own = own | {"EPD_PD_ROLE": kind}
            name = f"{kind}-{number}"
            environment = {
                "EPD_NATS_URL": options.nats_url or brokers.nats.url_for(role),
                "EPD_REDIS_URL": options.redis_url or brokers.redis.url_for(role),
                **common,
                **_place(options, role, name, arena),
                **own,
            }
            services.append(ServiceProcess(role, name, environment, logs / f"{name}.log"))
    return services


def _place(options: StackOptions, role: str, name: str, arena: Path) -> dict[str, str]:
    """A worker's node and arena, where it does not share those of all."""
    if role == "gateway" or options.store not in APART:
        return {}
    return {"EPD_NODE": name, "EPD_ARENA_DIR": str(arena / name)}


def metrics_ports(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """What each worker in turn is told: the port that ``EPD_METRICS_PORT`` names, the next one, and so on."""
    first = environment.get("EPD_METRICS_PORT", "0")
    if not first.isdigit() or int(first) == 0:
        return itertools.repeat({})  # a value that is none, each service names itself
    return ({"EPD_METRICS_PORT": str(port)} for port in itertools.count(int(first)))


async def _stop_all(services: list[ServiceProcess], up: list[bool]) -> None:
    """The gateway first: while it finishes its requests the workers still take their jobs."""
    gateways = [service for service in services if service.role == "gateway"]
    workers = [service for service in services if service.role != "gateway"]
    for group in (gateways, workers):
        await asyncio.gather(*(service.stop(at_once=not up) for service in group))


def _sweep_arenas() -> None:
    """Drop the arenas of stacks that were killed; each is named by its process, which may have several."""
    for arena in ARENA_ROOT.glob("epdflow-*"):
        pid = arena.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(arena, ignore_errors=True)


async def _until_ready(services: list[ServiceProcess], registry: Registry, report: Report) -> None:
    started = time.monotonic()
    while True:
        views = {view.record.worker: view for view in registry.workers()}
        elapsed_s = time.monotonic() - started
        rows = [("brokers", "ready", "")]
        rows += [_row(service, views.get(service.worker_id)) for service in services]
        report(StackView(rows, elapsed_s))
        for service in services:
            if service.returncode is not None:
                raise StackError(
                    f"{service.worker_id} ended while it started (exit status "
                    f"{service.returncode}). The end of its log, {service.log_path}:\n"
                    f"{service.log_tail()}"
                )
        if all(state == "ready" for _, state, _ in rows):
            return
        if elapsed_s > START_TIMEOUT_S:
            late = ", ".join(name for name, state, _ in rows if state != "ready")
            raise StackError(f"not ready after {START_TIMEOUT_S:g} s: {late}; their logs say more")
        await asyncio.sleep(POLL_S)


def _row(service: ServiceProcess, view: WorkerView | None) -> tuple[str, str, str]:
    if view is None or view.record.pid != service.pid:
        return service.worker_id, "starting", "process"
    record = view.record
    return service.worker_id, record.state, record.phase if record.state == "starting" else ""


def read_state(state_dir: Path) -> dict[str, Any]:
    """What ``epd up`` wrote.

    Raises:
        StackError: nothing runs there.
    """
    path = state_dir / "state.json"
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise StackError(
            f"nothing is ready here ({path.resolve()} is not there): start it with `epd up`, or wait until "
            "it is up; --state-dir names another place, --nats and --redis other brokers"
        ) from None
    return state
