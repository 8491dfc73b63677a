"""Who is let in when a system is nearly full: every tenant up to its share, and nobody beyond the whole.

Pure policy. A request has a *cost* (``epd_common.costs``), which is *open* from when it is let in until its
end.

* Nothing goes beyond ``capacity``.
* Up to the ``line`` everybody is let in: a system with room refuses nobody.
* Above it the system is *contended*. A tenant may then hold its share of the line, by its weight among the
  tenants that hold something, or ``least``, whichever is more. One that holds nothing is always let in: what
  lies between line and capacity is there for that.
* Without ``fair`` there are no tenants to protect from each other: the capacity alone counts.

Tokens do not tell how many workers' slots a tenant has, and who waits for a slot waits behind all who came
before. So a request of a tenant that has more than its share of the *slots* is let in but :func:`yields`: its
jobs wait where others go before them, in a lane that never gets all slots (``protocol/lanes.py``).

The sums that :func:`judge` is given must be of one moment, and those of several gateways are in Valkey: so
the ledger has the same rule in its script (``store/ledger.py``), and a test compares both. :func:`judge`
itself is for a gateway that cannot reach the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from epd_common.protocol.lanes import background_slots

RETRY_BOUNDS_S = (1.0, 30.0)


class Verdict(Enum):
    """What becomes of a request; the values are metrics' labels and errors' codes."""

    IN = "let_in"
    OVER_SHARE = "tenant_over_share"
    FULL = "system_full"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the open cost of one model.

    Attributes:
        capacity: Of all requests together.
        line: Above this the system is contended; not above the capacity.
        least: What a tenant may hold in any case while there is room.
        slots: Requests that run at once, of all that are open.
    """

    capacity: int
    line: int
    least: int
    fair: bool
    slots: int


@dataclass(frozen=True, slots=True)
class Sums:
    """What is open at one moment, without the request that is judged.

    Attributes:
        total: Cost of all tenants' requests.
        own: Cost of those of the request's tenant.
        others_weight: Sum of the weights of all other tenants that hold something.
        requests: How many requests of all tenants are open.
        own_requests: How many of the request's tenant.
    """

    total: int
    own: int
    others_weight: float
    requests: int = 0
    own_requests: int = 0


def judge(limits: Limits, sums: Sums, weight: float, cost: int) -> Verdict:
    """Whether a request of this cost, by a tenant of this weight, is let in."""
    if limits.fair and sums.own and sums.total + cost > limits.line:
        share = limits.line * weight / (weight + sums.others_weight)
        if sums.own + cost > max(share, limits.least):
            return Verdict.OVER_SHARE
    return Verdict.FULL if sums.total + cost > limits.capacity else Verdict.IN


def yields(limits: Limits, sums: Sums, weight: float) -> bool:
    """Whether a request that is let in goes behind those of others."""
    line = background_slots(limits.slots)
    if not limits.fair or sums.requests < line:
        return False
    share = line * weight / (weight + sums.others_weight)
    return sums.own_requests + 1 > max(1.0, share)


def retry_after_s(limits: Limits, sums: Sums, verdict: Verdict, cost: int, mean_s: float) -> float:
    """When it may make sense to ask again: once enough of what is open has ended.

    Args:
        mean_s: How long requests take, on average.
    """
    held = max(1, sums.total if verdict is Verdict.FULL else sums.own)
    bound = limits.capacity if verdict is Verdict.FULL else limits.line
    needed = max(cost, sums.total + cost - bound)
    low, high = RETRY_BOUNDS_S
    return min(max(mean_s * needed / held, low), high)
