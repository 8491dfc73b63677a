"""How many jobs a worker takes ahead of its engine."""

from __future__ import annotations

import pytest

from epd_common.bus.work_ahead import LEAST, WorkAhead

SLOTS = 16


def at_rate(job_s: float, *, batch: int = 1, ahead_s: float = 0.5, jobs: int = 48) -> int:
    """Jobs in work that are allowed to a worker that ends ``batch`` jobs at once, ``job_s`` each."""
    work = WorkAhead(ahead_s, SLOTS)
    now = 100.0
    for _ in range(jobs // batch):
        for _ in range(batch):
            work.began(now)
        now += job_s * batch
        for _ in range(batch):
            work.ended(now)
        now += 7.0  # idle times tell nothing
    return work.most


def test_by_its_rate() -> None:
    assert at_rate(0.01) == SLOTS
    assert at_rate(0.1) == 5
    assert at_rate(0.1, batch=4) == 5
    assert at_rate(0.4) == 2
    assert at_rate(0.6) == LEAST == at_rate(30.0)
    assert at_rate(30.0, ahead_s=0) == SLOTS


def test_without_any_end_there_is_no_rate() -> None:
    work = WorkAhead(0.5, SLOTS)
    assert work.most == SLOTS
    for number in range(SLOTS):
        work.began(float(number))
    assert (work.most, work.busy) == (SLOTS, SLOTS)


@pytest.mark.parametrize("slow", [True, False])
def test_a_rate_that_changes_is_followed(slow: bool) -> None:
    work = WorkAhead(0.5, SLOTS)
    now = 0.0
    for job_s in [0.001] * 40 + [1.0 if slow else 0.002] * 40:
        work.began(now)
        now += job_s
        work.ended(now)
    assert work.most == (LEAST if slow else SLOTS)


def test_one_slot_is_one_slot() -> None:
    work = WorkAhead(0.5, 1)
    work.began(0.0)
    work.ended(9.0)
    assert work.most == 1
