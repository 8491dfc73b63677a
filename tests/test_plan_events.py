"""Simulated time, and servers in it against the formulas of queueing theory."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from epd_plan.device import Device, Tower
from epd_plan.events import Events
from epd_plan.servers import Servers
from epd_sim.profiles import Profile, profile_named

CUSTOMERS = 200_000


def test_events_happen_in_the_order_of_their_times_and_equal_ones_as_planned() -> None:
    events, seen = Events(), []

    def note(name: str) -> None:
        seen.append((events.now, name))
        if name == "a":
            events.after(1.0, note, "behind b, as it was planned later")

    events.at(3.0, note, "c")
    events.at(1.0, note, "a")
    events.at(2.0, note, "b")
    events.run()
    assert [name for _, name in seen] == ["a", "b", "behind b, as it was planned later", "c"]
    assert [at for at, _ in seen] == [1.0, 2.0, 2.0, 3.0]


def test_what_is_cancelled_does_not_happen_and_nothing_after_a_stop() -> None:
    events, seen = Events(), []
    events.at(1.0, seen.append, "cancelled").cancel()
    events.at(2.0, events.stop)
    events.at(3.0, seen.append, "too late")
    events.run()
    assert seen == [] and events.now == 2.0


@pytest.mark.parametrize("time", [0.5, math.nan])
def test_the_past_cannot_be_planned(time: float) -> None:
    events = Events()
    events.at(1.0, lambda: None)
    events.run()
    with pytest.raises(ValueError, match="before"):
        events.at(time, lambda: None)


def mean_wait_s(servers: int, rate: float, service: Callable[[random.Random], float]) -> float:
    """Of customers that come at random."""
    rng, line = random.Random(7), Servers(servers)
    now = waited = 0.0
    for _ in range(CUSTOMERS):
        now += rng.expovariate(rate)
        seconds = service(rng)
        waited += line.serve(now, seconds) - now - seconds
    return waited / CUSTOMERS


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_one_server_with_equal_work(busy: float) -> None:
    """M/D/1: the mean wait is rho / (2 (1 - rho)) of a service (Pollaczek and Khinchine)."""
    formula = busy / (2 * (1 - busy))
    assert mean_wait_s(1, busy, lambda rng: 1.0) == pytest.approx(formula, rel=0.05)


@pytest.mark.parametrize(("servers", "busy"), [(1, 0.6), (3, 0.7), (16, 0.8)])
def test_several_servers_with_random_work(servers: int, busy: float) -> None:
    """M/M/c: Erlang's C."""
    load = servers * busy
    terms = [load**n / math.factorial(n) for n in range(servers)]
    last = load**servers / math.factorial(servers) / (1 - busy)
    formula = last / (sum(terms) + last) / (servers - load)
    found = mean_wait_s(servers, load, lambda rng: rng.expovariate(1.0))
    assert found == pytest.approx(formula, rel=0.08)


def one_by_one(encode_s: float) -> Profile:
    """A model that encodes an item of one row in so many seconds, alone."""
    published = profile_named("qwen2.5-vl-7b-h100")
    fields = {name: getattr(published, name) for name in Profile.__slots__}
    return Profile(**fields | {"encode_row_s": encode_s, "encode_batch": 1})


def test_a_tower_without_batches_is_such_a_server() -> None:
    busy, waited, events = 0.7, [], Events()
    device = Device(events)
    tower, rng = Tower(device, one_by_one(1.0)), random.Random(3)

    def come(left: int) -> None:
        came = events.now
        tower.encode(1, lambda: waited.append(events.now - came - 1.0))
        if left:
            events.after(rng.expovariate(busy), come, left - 1)

    come(20_000)
    events.run()
    assert len(waited) == 20_001
    assert sum(waited) / len(waited) == pytest.approx(busy / (2 * (1 - busy)), rel=0.08)
    assert device.busy_s == pytest.approx(20_001)


def test_a_device_computes_in_turn_what_two_ask_of_it() -> None:
    events, order = Events(), []
    device = Device(events, slow_factor=2.0)
    towers = [Tower(device, one_by_one(1.0)) for _ in range(2)]
    for number in (0, 0, 1, 1):
        towers[number].encode(1, lambda number=number: order.append((events.now, number)))
    events.run()
    assert order == [(2.0, 0), (4.0, 1), (6.0, 0), (8.0, 1)]
