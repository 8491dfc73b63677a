"""The processes of a run: started, kept running, and what is looked at while they do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import nats.errors
import psutil

from bench.nats_cluster import ClusterNode, NatsCluster, nats_cluster
from epd_cli.brokers import ValkeyBroker, embedded_brokers
from epd_cli.connect import operator_bus
from epd_cli.processes import ServiceProcess
from epd_cli.stack import PD_ROLES
from epd_common.bus import Bus, Registry
from epd_common.errors import UnavailableError
from epd_common.protocol import subjects
from epd_common.tasks import end

READY_WITHIN_S = 90.0
AGAIN_S = 0.3
STREAMS = (
    subjects.GENERATE_STREAM,
    subjects.ENCODE_STREAM,
    subjects.EXHAUSTED_STREAM,
    subjects.DLQ_STREAM,
    f"KV_{subjects.WORKERS_BUCKET}",
)
SETTINGS = {
    "EPD_ENGINE": "sim",
    "EPD_MODEL": "sim",
    "EPD_SERVED_MODEL": "sim",
    "EPD_SIM_PROFILE": "qwen2.5-vl-7b-h100",
    "EPD_SIM_TIME_SCALE": "0.2",
    "EPD_NATS_REPLICAS": "3",
    "EPD_HEARTBEAT_S": "1",
    "EPD_DRAIN_S": "10",
    "EPD_ENCODE_LEASE_S": "5",
    "EPD_MEDIA_TTL_S": "45",
    "EPD_EMBEDDING_TTL_S": "45",
    "EPD_ARENA_BYTES": str(256 << 20),
    "EPD_PORT": "0",
    "EPD_LOG_FORMAT": "text",
    # Two in three requests are handed over, and what is kept for that ends within the run.
    "EPD_SPLIT_TOKENS": "12",
    "EPD_KV_LEASE_S": "8",
}


def processes(*, pds: int, prefills: int, decodes: int) -> dict[str, int]:
    """How many of each role a run has, brokers aside."""
    counts = {"gateway": 2, "encoder": 3, "pd": pds, "prefill": prefills, "decode": decodes}
    return {role: count for role, count in counts.items() if count}


@dataclass(slots=True)
class Target:
    """A process that a fault may befall.

    Attributes:
        role: Of PD workers the kind: ``pd``, ``prefill`` or ``decode``.
        frozen: By a fault, now; ``mending`` while one is at it.
    """

    name: str
    role: str
    process: ServiceProcess | ClusterNode | ValkeyBroker
    frozen: bool = False
    mending: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def service(self) -> str:
        """The program, which is what it is in the registry and to the brokers."""
        return service_of(self.role)


def service_of(role: str) -> str:
    return "pd" if role in PD_ROLES else role


@dataclass(slots=True)
class Rig:
    """All processes of a run."""

    folder: Path
    arena: Path
    cluster: NatsCluster
    valkey: ValkeyBroker
    bus: Bus
    registry: Registry
    targets: list[Target]
    gateways: list[str] = field(default_factory=list)

    async def ready(self, target: Target) -> bool:
        """Whether it serves now."""
        if target.frozen or target.mending:
            return False
        if isinstance(target.process, ClusterNode):
            return target.process.running and await self.whole()
        if isinstance(target.process, ValkeyBroker):
            return target.process.running
        for view in self.registry.workers(target.service):
            if view.record.worker == target.name:
                return view.ready and view.record.pid == target.process.pid
        return False

    async def whole(self) -> bool:
        """Whether each NATS server has everything of every stream."""
        try:
            for stream in STREAMS:
                lag = await asyncio.wait_for(self.cluster.lag_of(self.bus, stream), 2)
                if len(lag) < len(self.cluster.nodes) - 1 or any(lag.values()):
                    return False
        except (TimeoutError, UnavailableError, nats.errors.Error):
            return False
        return True

    async def all_ready(self, within_s: float = READY_WITHIN_S) -> list[str]:
        """Wait until everything serves; the names of what does not."""
        give_up = time.monotonic() + within_s
        while True:
            late = [target.name for target in self.targets if not await self.ready(target)]
            if not late or time.monotonic() > give_up:
                return late
            await asyncio.sleep(AGAIN_S)

    def memory(self) -> dict[str, tuple[int, float]]:
        """Resident bytes and age in seconds of each process that lives now."""
        found = {}
        for target in self.targets:
            with contextlib.suppress(psutil.Error, Exception):
                process = psutil.Process(target.pid)
                found[target.name] = (
                    int(process.memory_info().rss),
                    time.time() - process.create_time(),
                )
        return found

    async def keep(self, target: Target) -> None:
        """Start a service again whenever it ends, as a supervisor does."""
        assert isinstance(target.process, ServiceProcess)
        while True:
            await target.process.wait()
            await asyncio.sleep(AGAIN_S)
            await target.process.start()


@contextlib.asynccontextmanager
async def rig(folder: Path, roles: Mapping[str, int]) -> AsyncIterator[Rig]:
    """Everything, ready; ended when the context is left.

    Args:
        roles: How many of each: :func:`processes`.
    """
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(nats_cluster(folder / "nats"))
        brokers = await stack.enter_async_context(
            embedded_brokers(folder / "brokers", nats=False, redis_maxmemory_bytes=512 << 20)
        )
        arena = Path(f"/dev/shm/epdflow-{os.getpid()}")
        stack.callback(shutil.rmtree, arena, ignore_errors=True)
        targets = []
        for role, count in roles.items():
            service = service_of(role)
            environment = {
                **SETTINGS,
                "EPD_NATS_URL": cluster.url_for(service),
                "EPD_REDIS_URL": brokers.redis.url_for(service),
                "EPD_ARENA_DIR": str(arena),
                **({"EPD_PD_ROLE": role} if service == "pd" else {}),
            }
            for number in range(1, count + 1):
                name = f"{role}-{number}"
                process = ServiceProcess(service, name, environment, folder / f"{name}.log")
                targets.append(Target(name, role, process))
                await process.start()
                stack.push_async_callback(process.stop)
        bus = await stack.enter_async_context(operator_bus(cluster.url, name="chaos"))
        registry = await stack.enter_async_context(Registry(bus))
        made = Rig(folder, arena, cluster, brokers.redis, bus, registry, list(targets))
        made.targets += [Target(node.name, "nats", node) for node in cluster.nodes]
        made.targets.append(Target("valkey", "valkey", brokers.redis))
        if late := await made.all_ready():
            raise UnavailableError(f"not ready within {READY_WITHIN_S} s: {', '.join(late)}")
        for view in registry.workers("gateway"):
            made.gateways.append(view.record.phase)
            target = next(t for t in targets if t.name == view.record.worker)
            assert isinstance(target.process, ServiceProcess)
            target.process.keep_port(view.record.phase.rpartition(":")[2])
        keepers = [asyncio.create_task(made.keep(t), name=f"keep {t.name}") for t in targets]
        stack.push_async_callback(_thaw, made)
        stack.push_async_callback(end, *keepers)
        yield made


async def _thaw(made: Rig) -> None:
    """A process that a fault left frozen would not hear that it is to end."""
    for target in made.targets:
        with contextlib.suppress(ProcessLookupError, Exception):
            os.kill(target.pid, signal.SIGCONT)
