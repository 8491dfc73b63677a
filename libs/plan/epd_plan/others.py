"""What this project is compared with, in simulated time: a proxy with fan-in, and colocated servers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from epd_plan.demand import Thing
from epd_plan.events import Events
from epd_plan.requests import Asked, Held, Record
from epd_plan.servers import Servers
from epd_plan.shape import Shape
from epd_plan.workers import Answerer, Door, Encoder, Way


class _Maker:
    """Encodes each item once at a time; knows of no other encoder's work but by what is held already."""

    def __init__(self, encoder: Encoder, held: Held) -> None:
        self._encoder = encoder
        self._held = held
        self._making: dict[str, list[Callable[[], None]]] = {}

    def make(self, thing: Thing, tell: Callable[[], None]) -> None:
        """Call back when the embedding can be read."""
        if self._held.has(thing.key):
            tell()
        elif (waiting := self._making.get(thing.key)) is not None:
            waiting.append(tell)
        else:
            self._making[thing.key] = [tell]
            self._encoder.encode(thing, partial(self._made, thing))

    def _made(self, thing: Thing) -> None:
        self._held.add(thing.key, thing.bytes)
        for tell in self._making.pop(thing.key):
            tell()


class _All:
    """Calls back after so many calls."""

    def __init__(self, count: int, tell: Callable[[], None]) -> None:
        self._left = count
        self._tell = tell

    def one(self) -> None:
        self._left -= 1
        if not self._left:
            self._tell()


class FanIn:
    """vLLM's example proxy: items go to the encoders in turn, and when all are done the request to the next
    PD server. It decodes nothing itself, and its encoders wait for nobody.

    Better than the proxy is here that one turn goes through all requests; its own begins with the first
    encoder each time.
    """

    def __init__(self, events: Events, shape: Shape, record: Record) -> None:
        self._events = events
        self._shape = shape
        self._door = Door(events, shape, shape.gateways, decodes=False)
        self._way = Way(events, shape)
        held = Held(shape.cache_bytes)
        self.encoders = [
            Encoder(events, shape, self._way, number=number) for number in range(shape.encoders)
        ]
        self._makers = itertools.cycle([_Maker(encoder, held) for encoder in self.encoders])
        self.pds = [Answerer(events, shape, record, lambda asked: None) for _ in range(shape.pds)]
        self._servers = itertools.cycle([(pd, Servers(1), self._way.own_end()) for pd in self.pds])

    def send(self, asked: Asked) -> None:
        """A client sends a request."""
        self._door.enter(asked, self._encode)

    def _encode(self, asked: Asked) -> None:
        answer = partial(self._answer, asked)
        if not asked.demand.things:
            answer()
            return
        done = _All(len(asked.demand.things), answer)
        for thing in asked.demand.things:
            maker = next(self._makers)
            self._events.after(self._shape.costs.message_s, maker.make, thing, done.one)

    def _answer(self, asked: Asked) -> None:
        pd, core, end = next(self._servers)
        begins = core.serve(self._events.now + self._shape.costs.message_s, self._shape.costs.pd_s)
        self._events.at(begins, self._read, asked, pd, end)

    def _read(self, asked: Asked, pd: Answerer, end: Servers) -> None:
        ready = self._events.now
        for thing in asked.demand.things:
            ready = self._way.read_at(end, thing)
        self._events.at(ready, self._enter, asked, pd)

    def _enter(self, asked: Asked, pd: Answerer) -> None:
        for thing in asked.demand.things:
            pd.pin(thing)
        pd.add(asked)


class Colocated:
    """Servers with tower and engine on one device, so that a batch of pictures holds up its tokens.

    A request goes to the server with the fewest open ones, and embeddings that one server made are there for
    all: better than most routers are.
    """

    def __init__(self, events: Events, shape: Shape, record: Record) -> None:
        way, held = Way(events, shape), Held(shape.cache_bytes)
        self.encoders: list[Encoder] = []
        self.pds = [_Server(events, shape, record, way, held, n) for n in range(shape.pds)]

    def send(self, asked: Asked) -> None:
        """A client sends a request."""
        min(self.pds, key=lambda server: server.open).send(asked)


class _Server:
    def __init__(
        self,
        events: Events,
        shape: Shape,
        record: Record,
        way: Way,
        held: Held,
        number: int,
    ) -> None:
        self.open = 0
        self._door = Door(events, shape, 1, decodes=True)
        self._answerer = Answerer(events, shape, record, self._ended)
        self.device = self._answerer.device
        encoder = Encoder(events, shape, way, number=number + 1, device=self.device)
        self._maker = _Maker(encoder, held)

    def send(self, asked: Asked) -> None:
        self.open += 1
        self._door.enter(asked, self._encode)

    def _encode(self, asked: Asked) -> None:
        enter = partial(self._enter, asked)
        if not asked.demand.things:
            enter()
            return
        done = _All(len(asked.demand.things), enter)
        for thing in asked.demand.things:
            self._maker.make(thing, done.one)

    def _enter(self, asked: Asked) -> None:
        for thing in asked.demand.things:
            self._answerer.pin(thing)
        self._answerer.add(asked)

    def _ended(self, asked: Asked) -> None:
        self.open -= 1
