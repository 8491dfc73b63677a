"""What befalls the processes: one fault after another, drawn from a seed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from typing import Literal

from bench.chaos.rig import Rig, Target
from epd_cli.brokers import ValkeyBroker
from epd_cli.processes import ServiceProcess

Kind = Literal["kill", "freeze", "restart"]
FROZEN_S = 3.0
DOWN_S = (0.5, 4.0)
"""A NATS server stays away for so long before it is started again."""

KINDS: dict[str, dict[Kind, float]] = {
    "gateway": {"kill": 1, "freeze": 1, "restart": 1},
    "encoder": {"kill": 1, "freeze": 1, "restart": 1},
    "pd": {"kill": 1, "freeze": 1, "restart": 1},
    "prefill": {"kill": 1, "freeze": 1, "restart": 1},
    "decode": {"kill": 1, "freeze": 1, "restart": 1},
    "nats": {"kill": 1, "freeze": 1, "restart": 1},
    "valkey": {"freeze": 4, "restart": 1},
}
"""What may befall each role, and how often relative to the others. A Valkey that was restarted is empty."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One that happened, ``at_s`` seconds after the begin."""

    at_s: float
    target: str
    role: str
    kind: Kind


class Faults:
    """Does one fault every so often, until it is stopped.

    One NATS server at a time is away: two of three would be no cluster. Of gateways, encoders and each
    kind of PD workers the last one that serves is left alone.
    """

    def __init__(self, rig: Rig, seed: int, *, every_s: float, began: float) -> None:
        self._rig = rig
        self._random = random.Random(f"faults-{seed}")
        self._every_s = every_s
        self._began = began
        self.done: list[Fault] = []

    async def run(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                began = time.monotonic()
                # The first, in an order drawn anew, that may have one.
                for target in self._random.sample(self._rig.targets, len(self._rig.targets)):
                    weights = KINDS[target.role]
                    (kind,) = self._random.choices(list(weights), list(weights.values()))
                    down_s = self._random.uniform(*DOWN_S)
                    if await self._may(target):
                        at_s = time.monotonic() - self._began
                        self.done.append(Fault(at_s, target.name, target.role, kind))
                        target.mending = True
                        group.create_task(self._do(target, kind, down_s))
                        break
                left_s = max(0.01, began + self._every_s - time.monotonic())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), left_s)

    async def _may(self, target: Target) -> bool:
        if target.mending or not await self._rig.ready(target):
            return False
        if target.role == "valkey":
            return True
        others = [t for t in self._rig.targets if t.role == target.role and t is not target]
        if target.role == "nats":
            return not any(other.mending for other in others)
        return any([await self._rig.ready(other) for other in others])

    async def _do(self, target: Target, kind: Kind, down_s: float) -> None:
        try:
            if kind == "freeze":
                await self._freeze(target)
            elif isinstance(target.process, ServiceProcess):
                # The rig starts it again.
                target.process.signal(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
            elif isinstance(target.process, ValkeyBroker):
                await target.process.restart()
            else:
                await (target.process.kill() if kind == "kill" else target.process.stop())
                await asyncio.sleep(down_s)
                await target.process.start()
        finally:
            target.mending = False

    async def _freeze(self, target: Target) -> None:
        pid = target.pid
        target.frozen = True
        try:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(FROZEN_S)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return
        finally:
            target.frozen = False
