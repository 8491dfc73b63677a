"""What all simulated systems are made of: a door, encoders, the link of embeddings, engines with requests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

from epd_common.turns import Place, Turns
from epd_plan.demand import Thing
from epd_plan.device import Device, Engine, Tower
from epd_plan.events import Events
from epd_plan.requests import Asked, Record
from epd_plan.servers import Servers
from epd_plan.shape import Shape
from epd_sim.scheduler import Sequence


class Door:
    """HTTP, and the pictures of a request: looked at, stored, decoded.

    Args:
        processes: Event loops, and ``Shape.cores`` for each of them.
        decodes: Whether it decodes pictures.
    """

    def __init__(self, events: Events, shape: Shape, processes: int, *, decodes: bool) -> None:
        self._events = events
        self._costs = shape.costs
        self._decodes = decodes
        self.loops = Servers(processes)
        self.cores = Servers(processes * shape.cores)

    def enter(self, asked: Asked, ready: Callable[[Asked], None]) -> None:
        """Take a request in, and go on with it as soon as all its pictures are looked at."""
        costs, things = self._costs, asked.demand.things
        cpu_s = costs.gateway_s + costs.picture_s * len(things)
        done = self.loops.serve(self._events.now, cpu_s)
        if self._decodes:
            # They begin before the loop is done, by as much as their own time at least.
            for thing in things:
                decoded = self.cores.serve(self._events.now, costs.pixel_s * thing.pixels)
                done = max(done, decoded + costs.gateway_s)
        self._events.at(done, ready, asked)


class Way:
    """The way of embeddings from encoders to PD workers; see :class:`epd_plan.costs.Link`."""

    def __init__(self, events: Events, shape: Shape) -> None:
        self._events = events
        self._link = shape.link
        self._server = Servers(1)

    def own_end(self) -> Servers:
        """One worker's end of it."""
        return self._server if self._link.shared else Servers(1)

    def written_at(self, end: Servers, thing: Thing) -> float:
        """When an embedding is written that a worker writes now."""
        return self._moved_at(end, thing, self._link.write_bytes_per_s)

    def read_at(self, end: Servers, thing: Thing) -> float:
        """When one is read."""
        return self._moved_at(end, thing, self._link.read_bytes_per_s)

    def _moved_at(self, end: Servers, thing: Thing, bytes_per_s: float) -> float:
        return end.serve(self._events.now, thing.bytes / bytes_per_s) + self._link.latency_s


class Encoder:
    """Makes embeddings: its core looks at the media, its tower encodes, its end of the way writes.

    Args:
        turns: Lets items into the tower; without it, all that are there.
    """

    def __init__(
        self,
        events: Events,
        shape: Shape,
        way: Way,
        *,
        number: int,
        device: Device | None = None,
        turns: Turns | None = None,
    ) -> None:
        factor = shape.slow_factor * (1.0 if number else shape.slow_first)
        self.device = device or Device(events, slow_factor=factor)
        self._events = events
        self._costs = shape.costs
        self._decodes = shape.encoders_decode
        self._tower = Tower(self.device, shape.profile)
        self._core = Servers(1)
        self._decoders = Servers(shape.cores)
        self._way = way
        self._end = way.own_end()
        self._race = random.Random(number)
        self._turns = turns
        self._waiting: dict[Place, Callable[[], None]] = {}

    def encode(self, thing: Thing, written: Callable[[], None]) -> None:
        """Encode an item, and tell when its embedding can be read."""
        now = self._events.now
        place = self._turns.arrive(now) if self._turns is not None else Place(0, 0)
        seen = self._core.serve(now, self._costs.encode_job_s)
        if self._decodes:
            decode_s = self._costs.pixel_s * thing.pixels
            seen = max(seen, self._decoders.serve(now, decode_s + self._costs.encode_job_s))
        seen += self._race.uniform(0.0, self._costs.encode_race_s)

        def encoded() -> None:
            self._events.at(self._way.written_at(self._end, thing), written)
            if self._turns is not None:
                self._turns.leave(place)
                self._let_in(self._turns)

        self._events.at(
            seen, self._prepared, place, partial(self._tower.encode, thing.rows, encoded)
        )

    def _prepared(self, place: Place, encode: Callable[[], None]) -> None:
        if self._turns is None:
            encode()
            return
        self._turns.ready(place)
        self._waiting[place] = encode
        self._let_in(self._turns)

    def _let_in(self, turns: Turns) -> None:
        for place in turns.let_in(self._events.now):
            self._waiting.pop(place)()
        if (again_at := turns.again_at(self._events.now)) is not None:
            self._events.at(again_at, self._let_in, turns)


class Answerer:
    """An engine with the requests that are in it, and with the embeddings that are pinned for them."""

    def __init__(
        self,
        events: Events,
        shape: Shape,
        record: Record,
        ended: Callable[[Asked], None],
        first: Callable[[Asked], None] = lambda asked: None,
    ):
        self.device = Device(events)
        self.pinned: Counter[str] = Counter()
        self._record = record
        self._inside: dict[Sequence, Asked] = {}
        self._ended = ended
        self._first_told = first
        self._engine = Engine(
            self.device,
            shape.profile,
            max_num_seqs=shape.max_num_seqs,
            is_here=lambda key: self.pinned[key] > 0,
            first=self._first,
            last=self._last,
        )

    def add(self, asked: Asked) -> None:
        """Answer a request."""
        self._inside[asked.sequence] = asked
        self._engine.add(asked.sequence)

    def pin(self, thing: Thing) -> None:
        """An embedding is here for one request."""
        self.pinned[thing.key] += 1
        self._engine.wake()

    def _first(self, sequence: Sequence) -> None:
        asked = self._inside[sequence]
        self._record.first(asked)
        self._first_told(asked)

    def _last(self, sequence: Sequence) -> None:
        asked = self._inside.pop(sequence)
        for thing in asked.demand.things:
            self.pinned[thing.key] -= 1
            if not self.pinned[thing.key]:
                del self.pinned[thing.key]
        self._record.last(asked)
        self._ended(asked)
