"""The order in which a worker asks its lanes, against one queue of all jobs."""

from __future__ import annotations

import random
from collections import deque

import pytest

from epd_common.bus.lane_order import LaneOrder
from epd_common.protocol.lanes import AGED_WAITS_S, lane_waits_s
from epd_common.protocol.subjects import LANES

WAITS_S = lane_waits_s(AGED_WAITS_S)
LAST = len(LANES) - 1
CLOCKS_APART_S = 1e6
"""The broker's clock is another one."""

Job = tuple[float, int]
"""When it was published, and its lane."""


def taken(jobs: list[Job], order: LaneOrder, *, step_s: float, begin: float) -> list[Job]:
    """The jobs as one worker takes them, which is ``step_s`` at each."""
    coming = deque(sorted(jobs))
    queues: list[deque[Job]] = [deque() for _ in WAITS_S]
    found: list[Job] = []
    now = begin
    while len(found) < len(jobs):
        while coming and coming[0][0] <= now:
            queues[coming[0][1]].append(coming.popleft())
        for lane in order.order():
            if queues[lane]:
                job = queues[lane].popleft()
                order.took(lane, published=job[0], now=now - CLOCKS_APART_S)
                found.append(job)
                break
            order.found_empty(lane, now=now - CLOCKS_APART_S)
        now += step_s
    return found


def some(rng: random.Random, count: int, lasting_s: float) -> list[Job]:
    lanes = rng.choices(range(LAST), (6, 2, 1, 1), k=count)
    return [(100 + rng.random() * lasting_s, lane) for lane in lanes]


def due(job: Job) -> float:
    return job[0] + WAITS_S[job[1]]


@pytest.mark.parametrize("begin", [100.0, 200.0], ids=["at an overload", "with all there"])
@pytest.mark.parametrize("seed", range(5))
def test_no_job_is_taken_before_one_that_is_known_to_be_more_urgent(
    seed: int, begin: float
) -> None:
    """What is known of a lane is the job before: its next one is not older."""
    step_s = 0.05
    jobs = some(random.Random(seed), 600, 20.0)  # 30 a second, and 20 are done
    found = taken(jobs, LaneOrder(WAITS_S), step_s=step_s, begin=begin)
    started = {job: begin + step_s * place for place, job in enumerate(found)}
    known: dict[int, Job] = {}
    for place, job in enumerate(found):
        if job[1] in known:
            for other in found[place + 1 :]:
                if other[0] <= started[job] and other[1] in known:
                    assert due(other) >= due(known[job[1]]), (job, other)
        known[job[1]] = job
    assert {lane for _, lane in found[:300]} == set(range(LAST)), "no lane is left to the end"


def test_with_equal_waits_the_oldest_comes_first() -> None:
    jobs = some(random.Random(0), 400, 20.0)
    found = taken(jobs, LaneOrder((0.0,) * len(LANES)), step_s=0.01, begin=200.0)
    moved = [abs(place - found.index(job)) for place, job in enumerate(sorted(jobs))]
    assert sum(moved) / len(moved) < 5, "but for one look into each lane"


def test_the_last_lane_waits_for_all_others() -> None:
    jobs: list[Job] = [(100.0, LAST), *((100 + n / 10, n % LAST) for n in range(80))]
    found = taken(jobs, LaneOrder(WAITS_S), step_s=0.01, begin=110.0)
    assert found[-1] == (100.0, LAST)


def test_nothing_is_known_at_first() -> None:
    order = LaneOrder(WAITS_S)
    for lane in range(len(LANES)):
        order.found_empty(lane, now=1.0)
    assert order.order() == list(range(len(LANES)))
