"""The open cost of all requests, shared by all gateways: a tenant has one share, not one a gateway.

One round trip asks for a request; one for whatever has ended meanwhile gives it back. Each entry has a lease
that its gateway renews while the request runs, and that ends with the request's deadline at the latest: what
a gateway leaves that dies is free again after ``LEASE_S``.

Where Valkey does not answer, a process judges by its own requests alone. Nothing is refused for that reason,
and the whole is still bounded, by the queues if not by the ledger.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from epd_common.errors import EpdError
from epd_common.protocol.subjects import model_token
from epd_common.shares import Limits, Sums, Verdict, judge
from epd_common.store.redis_client import redis_errors
from epd_common.tasks import end

logger = logging.getLogger(__name__)

LEASE_S = 10.0
RENEW_S = 3.0
ANSWER_S = 1.0
"""A request is not held up longer by a Valkey that does not answer."""

_PREFIX = "epd:v1:open:"
_KEEP_MS = 3_600_000
"""A ledger that nobody uses goes after this; no lease is longer."""

# What all scripts share. KEYS: leases (request -> end in ms), costs (request -> cost), owners (request ->
# tenant), sums (tenant -> cost), weights (tenant -> weight), counts (tenant -> requests). A tenant is in the
# last three while it holds something.
_COMMON = """
local leases, costs, owners, sums, weights, counts = unpack(KEYS)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function number(name, field, default)
  return tonumber(redis.call('HGET', name, field)) or default
end
local function give_back(request)
  local tenant = redis.call('HGET', owners, request)
  redis.call('ZREM', leases, request)
  if not tenant then return end
  local cost = tonumber(redis.call('HGET', costs, request))
  redis.call('HDEL', owners, request)
  redis.call('HDEL', costs, request)
  redis.call('HINCRBY', sums, tenant, -cost)
  if redis.call('HINCRBY', counts, tenant, -1) <= 0 then
    for _, name in ipairs({sums, weights, counts}) do redis.call('HDEL', name, tenant) end
  end
end
"""

# ARGV: request, tenant, weight, cost, lease in ms, capacity, line, least, fair ('1'), keep in ms.
# The rule is `judge` of shares.py. A request that holds something is judged without it.
_ASK = (
    _COMMON
    + """
local request, tenant, weight, cost = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local capacity, line, least = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
for _, lapsed in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do give_back(lapsed) end
give_back(request)
local total, own, others, requests, own_requests = 0, 0, 0, 0, 0
local held = redis.call('HGETALL', sums)
for i = 1, #held, 2 do
  total = total + tonumber(held[i + 1])
  if held[i] == tenant then
    own = tonumber(held[i + 1])
    own_requests = number(counts, tenant, 0)
  else
    others = others + number(weights, held[i], 1)
  end
  requests = requests + number(counts, held[i], 0)
end
local verdict = 'let_in'
if ARGV[9] == '1' and own > 0 and total + cost > line
  and own + cost > math.max(line * weight / (weight + others), least) then
  verdict = 'tenant_over_share'
elseif total + cost > capacity then
  verdict = 'system_full'
else
  redis.call('ZADD', leases, now + tonumber(ARGV[5]), request)
  redis.call('HSET', costs, request, cost)
  redis.call('HSET', owners, request, tenant)
  redis.call('HINCRBY', sums, tenant, cost)
  redis.call('HINCRBY', counts, tenant, 1)
  redis.call('HSET', weights, tenant, weight)
  for _, name in ipairs(KEYS) do redis.call('PEXPIRE', name, ARGV[10]) end
end
return {verdict, total, own, tostring(others), requests, own_requests}
"""
)

# ARGV: requests that have ended.
_END = _COMMON + "for _, request in ipairs(ARGV) do give_back(request) end"

# ARGV: request, lease in ms, request, lease in ms, ...
_RENEW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 1, #ARGV, 2 do redis.call('ZADD', KEYS[1], 'XX', now + tonumber(ARGV[i + 1]), ARGV[i]) end
"""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one request holds."""

    model: str
    tenant: str
    weight: float
    cost: int
    until: float
    """By the monotonic clock."""


class Ledger:
    """The open cost of this process's requests, and by Valkey that of all others.

    Use as an async context manager; while it is open it renews leases and gives back what has ended.
    """

    def __init__(self, redis: Redis) -> None:
        self._ask = redis.register_script(_ASK)
        self._end = redis.register_script(_END)
        self._renew = redis.register_script(_RENEW)
        self._open: dict[str, Holding] = {}
        self._ended: dict[str, list[str]] = defaultdict(list)
        self._something_ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.answers = True
        """Whether Valkey answered last."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep(), name="ledger")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:
            await end(self._task)
        for request in list(self._open):
            self.close(request)
        await self._give_back()

    @property
    def requests(self) -> int:
        """Requests of this process that hold something."""
        return len(self._open)

    async def ask(self, request: str, wanted: Holding, limits: Limits) -> tuple[Verdict, Sums]:
        """Ask for a request. If it is refused it holds nothing, also of what it held before."""
        before = self._open.get(request)
        # Held from now on: whatever becomes of the question, the end of the request gives it back.
        self._open[request] = wanted
        left_s = min(LEASE_S, max(wanted.until - time.monotonic(), 0.001))
        args: list[str | int | float] = [
            request,
            wanted.tenant,
            wanted.weight,
            wanted.cost,
            int(left_s * 1000),
            limits.capacity,
            limits.line,
            limits.least,
            int(limits.fair),
            _KEEP_MS,
        ]
        try:
            async with asyncio.timeout(ANSWER_S):
                with redis_errors():
                    word, *numbers = await self._ask(keys=_names(wanted.model), args=args)
            verdict = Verdict(word.decode())
            total, own, others, requests, own_requests = numbers
            sums = Sums(int(total), int(own), float(others), int(requests), int(own_requests))
            self._note_answer(None)
        except (EpdError, TimeoutError) as error:
            self._note_answer(error)
            sums = self._own_sums(request, wanted)
            verdict = judge(limits, sums, wanted.weight, wanted.cost)
        if verdict is not Verdict.IN:
            del self._open[request]
            if before is not None or not self.answers:
                self._note_end(request, wanted)
        return verdict, sums

    def close(self, request: str) -> None:
        """The request has ended, in whatever way: what it holds is given back at once."""
        if (held := self._open.pop(request, None)) is not None:
            self._note_end(request, held)

    def _note_end(self, request: str, held: Holding) -> None:
        self._ended[held.model].append(request)
        self._something_ended.set()

    def _own_sums(self, request: str, wanted: Holding) -> Sums:
        """Of this process's other requests."""
        others = [
            held
            for name, held in self._open.items()
            if name != request and held.model == wanted.model
        ]
        own = [held for held in others if held.tenant == wanted.tenant]
        weights = {held.tenant: held.weight for held in others if held.tenant != wanted.tenant}
        return Sums(
            total=sum(held.cost for held in others),
            own=sum(held.cost for held in own),
            others_weight=sum(weights.values()),
            requests=len(others),
            own_requests=len(own),
        )

    async def _keep(self) -> None:
        """Give back what has ended, at once and all that has ended meanwhile together; renew the rest."""
        renewed = time.monotonic()
        while True:
            left_s = max(renewed + RENEW_S - time.monotonic(), 0.0)
            try:
                async with asyncio.timeout(left_s):
                    await self._something_ended.wait()
            except TimeoutError:
                renewed = time.monotonic()
                await self._renew_all()
                continue
            self._something_ended.clear()
            await self._give_back()

    async def _give_back(self) -> None:
        for model in list(self._ended):
            requests = self._ended.pop(model)
            try:
                await self._tell(self._end, _names(model), requests)
            except asyncio.CancelledError:  # the process ends, and tells it then
                self._ended[model] += requests
                raise

    async def _renew_all(self) -> None:
        now = time.monotonic()
        leases: dict[str, list[str | int]] = defaultdict(list)
        for request, held in self._open.items():
            if held.until > now:
                leases[held.model] += [request, int(min(LEASE_S, held.until - now) * 1000)]
        for model, args in leases.items():
            await self._tell(self._renew, _names(model)[:1], args)

    async def _tell(self, script: AsyncScript, keys: list[str], args: Sequence[str | int]) -> None:
        """Run a script for something that will also come about by itself, when its lease ends."""
        try:
            async with asyncio.timeout(ANSWER_S):
                with redis_errors():
                    await script(keys=keys, args=args)
        except (EpdError, TimeoutError) as error:
            self._note_answer(error)

    def _note_answer(self, error: Exception | None) -> None:
        if error is not None and self.answers:
            logger.warning(
                "the ledger of open requests cannot be reached (%s); tenants' shares are judged by this "
                "process's requests alone",
                str(error) or type(error).__name__,
            )
        self.answers = error is None


_PARTS = ("leases", "costs", "owners", "sums", "weights", "counts")


def _names(model: str) -> list[str]:
    """The ledger's keys of a model, in the order of the scripts."""
    base = _PREFIX + model_token(model)
    return [f"{base}:{part}" for part in _PARTS]
