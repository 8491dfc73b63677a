"""Whether the client was the bottleneck: its CPU, how late its event loop is, how busy the machine."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

import msgspec
import psutil

from epd_common.tasks import end

_EVERY_S = 0.02
CPU_LIMIT = 0.8
"""Share of a core, above which the client may have been too slow."""

LAG_LIMIT_S = 0.025
"""Lateness of the event loop (99th percentile), above which times are not to be believed."""

MACHINE_LIMIT = 0.9


class ClientLoad(msgspec.Struct, kw_only=True):
    """What the measuring took.

    Attributes:
        cpu: Of the client, as a share of one core.
        lag_p99_s: By which the event loop woke too late.
        machine_cpu: Of all processes of this machine, as a share of all its cores.
        warnings: Why the figures may be the client's rather than the server's.
    """

    cpu: float
    lag_p50_s: float
    lag_p99_s: float
    machine_cpu: float
    cpu_per_request_s: float = 0.0
    warnings: list[str] = []


class Meter:
    """Measures while it is open."""

    def __init__(self) -> None:
        self._lags: list[float] = []

    async def __aenter__(self) -> Self:
        self._began = time.monotonic()
        self._cpu = time.process_time()
        self._machine = psutil.cpu_times()
        self._task = asyncio.create_task(self._watch(), name="event loop's lag")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await end(self._task)

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self._lags.append(max(0.0, time.monotonic() - due))

    def read(self, requests: int, late_s: list[float]) -> ClientLoad:
        """What was measured up to now.

        Args:
            late_s: How late each request was sent.
        """
        passed_s = max(1e-9, time.monotonic() - self._began)
        used_s = time.process_time() - self._cpu
        lags = sorted(self._lags) or [0.0]
        load = ClientLoad(
            cpu=used_s / passed_s,
            lag_p50_s=lags[len(lags) // 2],
            lag_p99_s=lags[int(0.99 * (len(lags) - 1))],
            machine_cpu=_busy(self._machine, psutil.cpu_times()),
            cpu_per_request_s=used_s / max(1, requests),
        )
        load.warnings = _warnings(load, late_s)
        return load


def _busy(before: object, after: object) -> float:
    spent = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
        if hasattr(after, name)
    }
    total = sum(spent.values())
    return 1.0 - (spent["idle"] + spent.get("iowait", 0.0)) / total if total > 0 else 0.0


def _warnings(load: ClientLoad, late_s: list[float]) -> list[str]:
    found = []
    if load.cpu > CPU_LIMIT:
        found.append(f"the client used {load.cpu:.0%} of a core: it was likely the bottleneck")
    if load.lag_p99_s > LAG_LIMIT_S:
        found.append(
            f"the client's event loop was up to {load.lag_p99_s * 1e3:.0f} ms late (p99): times are "
            "too long by as much"
        )
    late = sorted(late_s)
    if late and (worst := late[int(0.99 * (len(late) - 1))]) > LAG_LIMIT_S:
        found.append(f"requests were sent up to {worst * 1e3:.0f} ms late (p99)")
    if load.machine_cpu > MACHINE_LIMIT:
        found.append(
            f"this machine's cores were {load.machine_cpu:.0%} busy; what runs on it was held up"
        )
    return found
