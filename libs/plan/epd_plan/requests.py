"""Requests in a simulated system, and what came of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from epd_plan.demand import Demand
from epd_plan.events import Events
from epd_sim.scheduler import Sequence


@dataclass(slots=True, eq=False)
class Asked:
    """A request under way.

    Attributes:
        at_s: When it was sent.
        first_s: When the client had its first token; -1 before.
        sequence: What an engine is given for it.
    """

    demand: Demand
    at_s: float
    sequence: Sequence
    first_s: float = -1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request went, in seconds; ``tpot_s`` is -1 where there was one token."""

    number: int
    images: int
    at_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float


@dataclass(slots=True)
class Record:
    """What comes out of a system.

    Attributes:
        reply_s: Seconds that a token takes to the client.
        noted: Is told of each request with its first token, and with its last.
    """

    events: Events
    reply_s: float
    noted: Callable[[Asked], None] = lambda asked: None
    open: set[Asked] = field(default_factory=set)
    outcomes: list[Outcome] = field(default_factory=list)

    def sent(self, demand: Demand) -> Asked:
        """A request is sent now."""
        sequence = Sequence(demand.prompt_tokens, demand.answer_tokens, demand.spans)
        asked = Asked(demand, self.events.now, sequence)
        self.open.add(asked)
        return asked

    def first(self, asked: Asked) -> None:
        """Its first token leaves its engine."""
        asked.first_s = self.events.now + self.reply_s
        self.noted(asked)

    def last(self, asked: Asked) -> None:
        """Its last one does."""
        self.open.remove(asked)
        demand, ends_s = asked.demand, self.events.now + self.reply_s
        steps = demand.answer_tokens - 1
        tpot_s = (ends_s - asked.first_s) / steps if steps else -1.0
        self.outcomes.append(
            Outcome(
                demand.number,
                demand.images,
                asked.at_s,
                asked.first_s - asked.at_s,
                tpot_s,
                ends_s - asked.at_s,
            )
        )
        self.noted(asked)


class Held:
    """Embeddings that are kept; the least recently used go first.

    Args:
        most_bytes: Of all together.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._held: OrderedDict[str, int] = OrderedDict()

    def add(self, key: str, size_bytes: int) -> None:
        """It was made."""
        if key not in self._held:
            self._bytes += size_bytes
        self._held[key] = size_bytes
        self._held.move_to_end(key)
        while self._bytes > self._most_bytes and len(self._held) > 1:
            self._bytes -= self._held.popitem(last=False)[1]

    def has(self, key: str) -> bool:
        """Whether it is there; that is a use of it."""
        if key not in self._held:
            return False
        self._held.move_to_end(key)
        return True
