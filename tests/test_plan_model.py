"""The model of the system: nothing is lost in it, and its policies do in it what they are for."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from epd_bench.arrivals import arrival_times
from epd_bench.builtin import RandomMm, find_workload
from epd_bench.quantiles import quantiles
from epd_bench.workloads import Workload
from epd_pd.settings import PdSettings
from epd_plan.costs import Costs, link_named
from epd_plan.demand import Demand, demands
from epd_plan.device import Device, Engine
from epd_plan.events import Events
from epd_plan.requests import Held
from epd_plan.shape import Shape, sliced
from epd_plan.simulate import Run, simulate
from epd_sim.profiles import profile_named
from epd_sim.scheduler import Scheduler, Sequence, Span

H100 = profile_named("qwen2.5-vl-7b-h100")
AZURE = find_workload("azure", RandomMm())
ALBUM = Workload.model_validate(
    {
        "name": "album",
        "kinds": [
            {"weight": 9, "images": 1, "sizes": {"640x640": 1}, "output_tokens": 20},
            {"weight": 1, "images": 25, "sizes": {"640x640": 1}, "output_tokens": 20},
        ],
    }
)


def shape(**given: Any) -> Shape:
    return Shape(**{"profile": H100, "encoders": 4, "pds": 4} | given)


def run(workload: Workload, rate: float, count: int, seed: int = 1, **given: Any) -> Run:
    times = arrival_times(rate, 1.0, seed)
    return simulate(shape(**given), zip(times, demands(workload, seed, H100), strict=False), count)


def late_s(found: Run, images: int | None = None) -> float:
    """TTFT p99 of the requests with so many pictures."""
    return quantiles(
        one.ttft_s for one in found.outcomes if images is None or one.images == images
    ).p99


# -- nothing is lost -------------------------------------------------------------------------------

SYSTEMS: dict[str, dict[str, Any]] = {
    "split": {},
    "ec_both": {"encoders": 0, "pds": 8},
    "fan-in": {"system": "fan-in"},
    "colocated": {"system": "colocated", "encoders": 0, "pds": 8},
    "split, little cache": {"cache_bytes": 1 << 20},
    "split, few places": {"max_num_seqs": 2, "pd_slots": 3, "max_incomplete": 1},
}


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("workload", ["azure", "chat", "one-picture"])
def test_what_goes_in_comes_out_once(name: str, workload: str) -> None:
    found = run(find_workload(workload, RandomMm()), 12.0, 300, **SYSTEMS[name])
    assert found.sent == len(found.outcomes) == 300 and found.open == 0 and not found.stopped
    assert len({one.number for one in found.outcomes}) == 300
    assert all(0 < one.ttft_s <= one.e2e_s for one in found.outcomes)


def test_the_same_seed_gives_the_same_times_and_another_one_others() -> None:
    assert run(AZURE, 8.0, 200).outcomes == run(AZURE, 8.0, 200).outcomes
    assert run(AZURE, 8.0, 200).outcomes != run(AZURE, 8.0, 200, seed=2).outcomes


def test_a_request_alone_takes_what_its_stages_take() -> None:
    one = find_workload("random-mm", RandomMm(images=1, sizes="1920x1080", text=100, output=11))
    demand = next(demands(one, 1, H100))
    times = itertools.count(0.0, 100.0)
    found = simulate(shape(), zip(times, itertools.repeat(demand)), 2)
    first, again = found.outcomes
    encode_s, prefill_s = H100.encode_s([demand.things[0].rows]), 46.4e-6 * demand.prompt_tokens
    between_s = first.ttft_s - encode_s - prefill_s
    assert 0.01 < between_s < 0.06, "pictures are decoded twice, and 19 MB written and read"
    assert again.ttft_s == pytest.approx(first.ttft_s - encode_s, abs=0.05), "it is kept"
    assert first.tpot_s == pytest.approx(H100.engine_step_s(0, 1), rel=0.01)


def test_an_item_is_encoded_once_however_many_ask_for_it() -> None:
    found = run(find_workload("one-picture", RandomMm()), 500.0, 64)
    encoded_s = found.encoders_busy * 4 * found.outcomes[-1].e2e_s
    rows = next(demands(find_workload("one-picture", RandomMm()), 1, H100)).things[0].rows
    assert encoded_s <= 1.5 * H100.encode_s([rows])


def test_runs_of_steps_give_what_single_steps_give() -> None:
    """The engine takes steps that are alike as one event; here each is made by hand."""
    rng = random.Random(5)
    plan = sorted(
        (rng.uniform(0, 2.0), rng.randrange(1, 3000), rng.randrange(1, 60)) for _ in range(60)
    )
    events, ends = Events(), {}
    engine = Engine(
        Device(events),
        H100,
        max_num_seqs=8,
        is_here=lambda key: True,
        first=lambda sequence: None,
        last=lambda sequence: ends.update({numbers[id(sequence)]: events.now}),
    )
    sequences = [Sequence(prompt, answer) for _, prompt, answer in plan]
    numbers = {id(sequence): number for number, sequence in enumerate(sequences)}
    for (at, _, _), sequence in zip(plan, sequences, strict=True):
        events.at(at, engine.add, sequence)
    events.run()
    now, waiting = 0.0, [(at, Sequence(p, a), n) for n, (at, p, a) in enumerate(plan)]
    by_hand: dict[int, float] = {}
    scheduler = Scheduler(max_num_seqs=8, budget=H100.prefill_budget)
    names = {id(sequence): number for _, sequence, number in waiting}
    while len(by_hand) < len(plan):
        while waiting and waiting[0][0] <= now:
            scheduler.add(waiting.pop(0)[1])
        step = scheduler.schedule(lambda key: True)
        if step.empty:
            now = waiting[0][0]
            continue
        now += H100.engine_step_s(step.prefill_tokens, step.decoding)
        by_hand |= {names[id(one)]: now for one in scheduler.advance(step) if one.ended}
    assert ends == pytest.approx(by_hand)


def test_the_least_recently_used_embeddings_go() -> None:
    held = Held(100)
    for key in "abc":
        held.add(key, 40)
        held.has("a")
    assert [held.has(key) for key in "abc"] == [True, False, True]


def test_settings_are_those_of_the_services() -> None:
    fields = PdSettings.model_fields
    made = shape()
    for name in (
        "lane_waits_s",
        "encoder_slots",
        "encode_ahead_s",
        "max_incomplete",
        "prefill_wait_s",
    ):
        assert getattr(made, name) == fields[name].default, name


# -- what policies are for -------------------------------------------------------------------------


def test_lanes_bring_single_pictures_past_albums() -> None:
    same = {"encoders": 2, "pds": 4, "slow_factor": 3.0}
    lanes = run(ALBUM, 5.0, 800, **same)
    oldest_first = run(ALBUM, 5.0, 800, lane_waits_s=(0.0, 0.0, 0.0), **same)
    assert late_s(lanes, 1) < 0.7 * late_s(oldest_first, 1)
    assert late_s(lanes, 25) < 3.0 + 2 * late_s(oldest_first, 25), "albums wait for a bounded time"


def test_a_slow_encoder_takes_little_ahead() -> None:
    same = {"slow_first": 8.0, "slow_factor": 2.0}
    little = run(AZURE, 6.0, 800, **same)
    full = run(AZURE, 6.0, 800, encode_ahead_s=0.0, **same)
    assert late_s(little) < 0.7 * late_s(full)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("workload", ["azure", "random-mm"])
def test_fan_in_is_never_better_with_a_slow_encoder(workload: str, seed: int) -> None:
    found = find_workload(workload, RandomMm(images=4, sizes="1280x720", text=400, output=50))
    ours = run(found, 5.0, 500, seed, slow_first=5.0)
    fan_in = run(found, 5.0, 500, seed, slow_first=5.0, system="fan-in")
    assert late_s(ours) <= late_s(fan_in)
    assert ours.ttft.mean <= fan_in.ttft.mean


def test_prefill_begins_before_the_last_picture() -> None:
    one = find_workload("random-mm", RandomMm(images=6, sizes="1280x720", text=50, output=2))
    in_order = {"encoders": 1, "costs": Costs(encode_race_s=0.0)}
    early = run(one, 0.2, 40, **in_order)
    held_outside = run(one, 0.2, 40, max_incomplete=0, **in_order)
    assert early.ttft.p50 < held_outside.ttft.p50 - 0.05
    raced = run(one, 0.2, 40, encoders=1)
    assert early.ttft.p50 == pytest.approx(raced.ttft.p50, abs=0.01), "the first goes first anyway"
    fan_in = run(one, 0.2, 40, encoders=1, system="fan-in")
    assert raced.ttft.p50 < 0.9 * fan_in.ttft.p50


def test_pictures_hold_up_tokens_where_one_device_does_both() -> None:
    found = find_workload("random-mm", RandomMm(images=2, sizes="1280x720", text=50, output=400))
    apart = run(found, 4.0, 300)
    together = run(found, 4.0, 300, system="colocated", encoders=0, pds=4)
    assert together.tpot.p50 > 1.1 * apart.tpot.p50


def test_valkey_is_one_link_for_all() -> None:
    one = find_workload("random-mm", RandomMm(images=4, sizes="1920x1080", text=50, output=2))
    given = {"encoders": 16, "pds": 16}
    assert (
        run(one, 8.0, 200, link=link_named("valkey"), **given).ttft.p50
        > 2 * run(one, 8.0, 200, **given).ttft.p50
    )


# -- sizes -----------------------------------------------------------------------------------------


def test_prompts_have_the_tokens_that_the_simulated_engine_counts() -> None:
    found = find_workload("random-mm", RandomMm(images=2, sizes="640x640", text=400, output=9))
    demand: Demand = next(demands(found, 1, H100))
    assert (demand.images, demand.answer_tokens, len(demand.things)) == (2, 9, 2)
    assert demand.prompt_tokens == 5 + 2 * (529 + 2) + 400 + 3
    assert demand.spans == (
        Span(demand.things[0].key, 6, 529),
        Span(demand.things[1].key, 6 + 531, 529),
    )
    assert demand.things[0].bytes == 2 * 529 * 3584


def test_a_large_system_is_simulated_by_a_slice_of_it() -> None:
    whole = shape(encoders=1000, pds=4000, gateways=50)
    part, rate = sliced(whole, 5000.0)
    assert part.workers <= 128 and rate == pytest.approx(5000 * 128 / 5000, rel=0.02)
    assert sliced(shape(), 8.0) == (shape(), 8.0)


@pytest.mark.slow
def test_a_slice_does_what_the_whole_does() -> None:
    given = {"encoders": 16, "pds": 48, "gateways": 8}
    whole = run(AZURE, 120.0, 3000, **given)
    small, rate = sliced(shape(**given), 120.0, most=32)
    part = run(AZURE, rate, 3000, encoders=small.encoders, pds=small.pds, gateways=small.gateways)
    assert whole.ttft.p50 < part.ttft.p50 < 1.25 * whole.ttft.p50, "it evens out less"
    assert part.pds_busy == pytest.approx(whole.pds_busy, rel=0.1)
