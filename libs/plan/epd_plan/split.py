"""This project in simulated time: encodes and generates as jobs, pulled by whoever has a slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from epd_common.backlog import Backlog, Share
from epd_common.early import may_enter_early
from epd_common.protocol.lanes import encode_lane, generate_lane, lane_waits_s
from epd_common.turns import Turns
from epd_common.urgency import engine_priority
from epd_plan.demand import Thing
from epd_plan.device import Device
from epd_plan.events import Events
from epd_plan.queue import Puller, Queue
from epd_plan.requests import Asked, Held, Record
from epd_plan.servers import Servers
from epd_plan.shape import Shape
from epd_plan.workers import Answerer, Door, Encoder, Way


class Split:
    """Gateways, NATS, encoders and PD workers."""

    def __init__(self, events: Events, shape: Shape, record: Record) -> None:
        self.events = events
        self.shape = shape
        self.record = record
        self.way = Way(events, shape)
        self.generates: Queue[Asked] = Queue(events)
        self.encodes: Queue[Thing] = Queue(events)
        self._door = Door(events, shape, shape.gateways, decodes=True)
        self._streams = {self.generates: Servers(1), self.encodes: Servers(1)}
        self._held = Held(shape.cache_bytes)
        self._making: dict[str, list[Callable[[], None]]] = {}
        self.pds = [_Pd(self) for _ in range(shape.pds)]
        devices: list[Device | None] = [None] * shape.encoders
        if not shape.encoders:
            devices = [pd.device for pd in self.pds]
        self.encoders = [_Encoder(self, n, device) for n, device in enumerate(devices)]

    def send(self, asked: Asked) -> None:
        """A client sends a request."""
        self._door.enter(asked, self._publish_jobs)

    def _publish_jobs(self, asked: Asked) -> None:
        things = asked.demand.things
        for place, thing in enumerate(things):
            if not self._held.has(thing.key):
                self._order(thing, place)
        self._publish(self.generates, generate_lane(len(things)), asked)

    def _order(self, thing: Thing, place: int) -> None:
        """Have an item encoded, once at a time in the whole system."""
        if thing.key not in self._making:
            self._making[thing.key] = []
            self._publish(self.encodes, encode_lane(place), thing)

    def _publish(self, queue: Queue[Asked] | Queue[Thing], lane: str, job: Asked | Thing) -> None:
        stored = self._streams[queue].serve(self.events.now, self.shape.costs.nats_s)
        self.events.at(stored + self.shape.costs.message_s, queue.publish, lane, job)

    def when_ready(self, thing: Thing, place: int, tell: Callable[[], None]) -> None:
        """Call back as soon as an item's embedding can be read; what was evicted is ordered again."""
        if self._held.has(thing.key):
            tell()
            return
        self._order(thing, place)
        self._making[thing.key].append(tell)

    def ready(self, thing: Thing) -> None:
        """An embedding can be read."""
        self._held.add(thing.key, thing.bytes)
        for tell in self._making.pop(thing.key):
            self.events.after(self.shape.costs.message_s, tell)


class _Encoder:
    """An encoder, or the part of a PD worker that encodes."""

    def __init__(self, system: Split, number: int, device: Device | None) -> None:
        self._system = system
        shape = system.shape
        self._encoder = Encoder(
            system.events, shape, system.way, number=number, device=device, turns=Turns()
        )
        self.device = self._encoder.device
        self._puller: Puller[Thing] = Puller(
            system.encodes,
            system.events,
            waits_s=lane_waits_s(shape.lane_waits_s),
            slots=shape.encoder_slots,
            ahead_s=shape.encode_ahead_s,
            start=lambda thing, published: self._encoder.encode(thing, partial(self._done, thing)),
        )

    def _done(self, thing: Thing) -> None:
        self._system.ready(thing)
        self._puller.release()


@dataclass(slots=True, eq=False)
class _Job:
    """A generate job in a worker.

    Attributes:
        missing: Keys that are not pinned yet.
        early: It is in the engine, and takes one of the places of incomplete requests.
    """

    asked: Asked
    missing: set[str]
    early: bool = False


class _Pd:
    """A PD worker."""

    def __init__(self, system: Split) -> None:
        self._system = system
        shape = system.shape
        self._backlog = Backlog()
        self._shares: dict[Asked, Share] = {}
        self._answerer = Answerer(
            system.events, shape, system.record, self._ended, first=self._prefilled
        )
        self.device = self._answerer.device
        self._core = Servers(1)
        self._end = system.way.own_end()
        self._outside: dict[_Job, None] = {}
        self._free = shape.max_incomplete
        self._puller: Puller[Asked] = Puller(
            system.generates,
            system.events,
            waits_s=lane_waits_s(shape.lane_waits_s),
            slots=shape.pd_slots,
            ahead_s=0.0,
            start=self._start,
            load=lambda: self._backlog.level,
        )

    def _start(self, asked: Asked, published: float) -> None:
        self._shares[asked] = self._backlog.add(asked.demand.estimate)
        asked.sequence.priority = engine_priority(
            0,
            published=published,
            prompt_tokens=asked.demand.estimate,
            long_wait_s=self._system.shape.prefill_wait_s,
        )
        events = self._system.events
        seen = self._core.serve(events.now, self._system.shape.costs.pd_s)
        events.at(seen, self._wait_for_items, asked)

    def _wait_for_items(self, asked: Asked) -> None:
        things = asked.demand.things
        job = _Job(asked, {thing.key for thing in things})
        self._outside[job] = None
        for place, thing in enumerate(things):
            self._system.when_ready(thing, place, partial(self._fetch, job, thing))
        self._let_in()

    def _fetch(self, job: _Job, thing: Thing) -> None:
        read = self._system.way.read_at(self._end, thing)
        self._system.events.at(read, self._arrived, job, thing)

    def _arrived(self, job: _Job, thing: Thing) -> None:
        job.missing.discard(thing.key)
        self._answerer.pin(thing)
        if not job.missing and job.early:
            job.early = False
            self._free += 1
        self._let_in()

    def _let_in(self) -> None:
        """As ``epd_pd.admission``; sizes are known, as they are for all but the first pictures of a size."""
        for job in [job for job in self._outside if self._may_enter(job)]:
            if job.missing:
                if not self._free:
                    continue
                self._free -= 1
                job.early = True
            del self._outside[job]
            self._answerer.add(job.asked)

    def _may_enter(self, job: _Job) -> bool:
        demand = job.asked.demand
        return not job.missing or may_enter_early(
            sized=True,
            first_is_here=demand.things[0].key not in job.missing,
            text_before=demand.text_before,
        )

    def _prefilled(self, asked: Asked) -> None:
        self._shares[asked].prefilled()
        self._puller.renew()

    def _ended(self, asked: Asked) -> None:
        self._shares.pop(asked).end()
        self._puller.release()
