"""Who is let in: asks the shared ledger for each request, and says when to come again."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from epd_common.bus import Registry
from epd_common.costs import ROWS_UNSEEN, Prices, Work
from epd_common.errors import BusyError
from epd_common.protocol import WorkerRecord
from epd_common.shares import Limits, Sums, Verdict, retry_after_s, yields
from epd_common.store import Ledger
from epd_common.store.ledger import Holding
from epd_gateway.auth import Caller
from epd_gateway.metrics import GatewayMetrics
from epd_gateway.settings import GatewaySettings

SLOT_TOKENS = 65_536
"""Open cost for each slot of a model's PD workers: what runs in it, and a queue behind that."""

WORTH_ASKING = 0.1
"""A cost that turns out to differ by less than this share of it is not told the ledger again."""

_FIRST_MEAN_S = 2.0
_SMOOTHING = 0.1


class Door:
    """What lets requests in.

    Args:
        fair: Whether there are tenants, who have shares; else the capacity alone counts.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        ledger: Ledger,
        registry: Registry,
        metrics: GatewayMetrics,
        fair: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._prices = Prices(
            visual=settings.admission_visual_weight, answer=settings.admission_answer_weight
        )
        self._ledger = ledger
        self._registry = registry
        self._metrics = metrics
        self._fair = fair
        self._mean_s = _FIRST_MEAN_S
        self._mean_rows: float | None = None
        """Of the media that came through here; expected of those that come."""

    def entry(self, caller: Caller, *, timeout_s: float) -> Entry:
        """For one request, which ends within ``timeout_s``."""
        return Entry(self, caller, time.monotonic() + timeout_s)

    async def ask(self, entry: Entry, worker: WorkerRecord, work: Work) -> None:
        """Let a request in, or raise.

        Raises:
            BusyError: ``tenant_over_share`` or ``system_full``.
        """
        limits = self._limits(worker)
        # What costs more than that counts as that, or it could never run. With other tenants about, what lies
        # above the line is theirs.
        most = limits.line if limits.fair else limits.capacity
        cost = min(self._prices.cost(work, rows_unseen=self._rows_unseen(work)), most)
        if entry.cost and abs(cost - entry.cost) <= WORTH_ASKING * entry.cost:
            return
        caller = entry.caller
        wanted = Holding(worker.model, caller.tenant, caller.weight, cost, entry.until)
        verdict, sums = await self._ledger.ask(entry.id, wanted, limits)
        if (
            verdict is not Verdict.IN
        ):  # who is let in is counted at the end, as it may be asked again
            self._metrics.admissions.labels(caller.tenant, verdict.value).inc()
        open_cost = sums.total + (cost if verdict is Verdict.IN else 0)
        self._metrics.show_door(worker.model, capacity=limits.capacity, open_cost=open_cost)
        self._metrics.ledger.set(self._ledger.answers)
        if verdict is not Verdict.IN:
            entry.cost = 0
            again_s = retry_after_s(limits, sums, verdict, cost, self._mean_s)
            raise _refusal(caller.tenant, limits, sums, verdict, cost, again_s)
        entry.cost = cost
        entry.yields = yields(limits, sums, caller.weight)

    def _rows_unseen(self, work: Work) -> float:
        """Rows to expect of a part that nobody has looked at; learned from those that somebody has."""
        if work.visual is not None and work.media:
            rows = work.visual / work.media
            before = rows if self._mean_rows is None else self._mean_rows
            self._mean_rows = before + _SMOOTHING * (rows - before)
        return ROWS_UNSEEN if self._mean_rows is None else self._mean_rows

    def close(self, entry: Entry) -> None:
        self._ledger.close(entry.id)
        if entry.cost:
            self._metrics.admissions.labels(entry.caller.tenant, Verdict.IN.value).inc()
            took_s = time.monotonic() - entry.began
            self._mean_s += _SMOOTHING * (took_s - self._mean_s)

    def _limits(self, worker: WorkerRecord) -> Limits:
        records = self._registry.ready("pd", worker.model) or [worker]
        slots = max(1, sum(record.slots for record in records))
        capacity = self._settings.admission_capacity or slots * SLOT_TOKENS
        return Limits(
            capacity=capacity,
            line=int(capacity * self._settings.admission_line),
            least=self._settings.admission_least,
            fair=self._fair(),
            slots=slots,
        )


class Entry:
    """One request's way through the door."""

    def __init__(self, door: Door, caller: Caller, until: float) -> None:
        self._door = door
        self.id = secrets.token_hex(8)
        self.caller = caller
        self.began = time.monotonic()
        self.until = until
        self.cost = 0
        """What it holds."""
        self.yields = False
        """See ``epd_common.requester.Entry``."""

    async def ask(self, worker: WorkerRecord, work: Work) -> None:
        """See ``epd_common.requester.Entry``."""
        await self._door.ask(self, worker, work)

    def close(self) -> None:
        """See ``epd_common.requester.Entry``."""
        self._door.close(self)


def _refusal(
    tenant: str, limits: Limits, sums: Sums, verdict: Verdict, cost: int, again_s: float
) -> BusyError:
    if verdict is Verdict.FULL:
        text = (
            f"the system is full: requests of cost {sums.total} are open, at most {limits.capacity} may "
            f"be, and this one has {cost}; try again later"
        )
    else:
        text = (
            f"the system is busy, and tenant {tenant!r} has its share of it: requests of cost {sums.own} "
            f"are open, and this one has {cost}; wait for some of them"
        )
    return BusyError(text, code=verdict.value, stage="queue", retry_after_s=again_s)
