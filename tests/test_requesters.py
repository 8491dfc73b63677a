"""When a requester counts as dead, and when nobody may be judged. Pure policy; times are made up."""

from __future__ import annotations

import random

import pytest

from epd_pd.requesters import Beats, LifeSigns

TTL_S = 6.0
BEAT_S = TTL_S / 3


def fresh(now: float) -> Beats:
    return Beats(now - 0.1, TTL_S)


def test_a_requester_dies_by_its_own_time_to_live() -> None:
    signs = LifeSigns()
    signs.look(0.0, fresh(0.0), {"g": Beats(0.0, TTL_S)})
    for now in (1.0, 5.9):
        assert signs.look(now, fresh(now), {"g": Beats(0.0, TTL_S)}) == set()
    assert signs.look(6.0, fresh(6.0), {"g": Beats(0.0, TTL_S), "h": fresh(6.0)}) == {"g"}


def test_one_that_has_left_the_registry_is_judged_by_its_last_beat() -> None:
    signs = LifeSigns()
    signs.look(0.0, fresh(0.0), {"g": Beats(0.0, TTL_S)})
    assert signs.look(5.0, fresh(5.0), {"g": None}) == set()
    assert signs.look(6.0, fresh(6.0), {"g": None}) == {"g"}
    assert signs.look(7.0, fresh(7.0), {}) == set()
    assert signs.look(8.0, fresh(8.0), {"g": None}) == set(), "it is forgotten with its requests"


def test_one_that_was_never_there_is_not_judged() -> None:
    signs = LifeSigns()
    for now in range(100):
        assert signs.look(now, fresh(now), {"somebody": None}) == set()


def test_who_does_not_see_itself_judges_nobody() -> None:
    signs = LifeSigns()
    old = {"g": Beats(0.0, TTL_S)}
    assert signs.look(0.0, fresh(0.0), old) == set()
    assert signs.look(60.0, Beats(0.0, TTL_S), old) == set()
    assert signs.look(60.0, None, old) == set()
    # The way is clear again, and the requester's beat has not come through yet.
    assert signs.look(61.0, fresh(61.0), old) == set()
    assert signs.look(61.0 + TTL_S - 0.1, fresh(66.9), old) == set()
    assert signs.look(61.0 + TTL_S, fresh(67.0), old) == {"g"}


@pytest.mark.parametrize("seed", range(20))
def test_no_outage_kills_a_requester_that_lives(seed: int) -> None:
    """Beats of both come every ``BEAT_S`` and are lost in outages of any length, at any moment."""
    dice = random.Random(seed)
    signs = LifeSigns()
    theirs_s = BEAT_S * dice.choice((0.5, 1, 2))  # their heartbeat; their ttl is three of it
    outages = []
    at = 0.0
    for _ in range(20):
        at += dice.uniform(10 * theirs_s, 30 * theirs_s)
        outages.append((at, at + dice.uniform(0, 30)))
        at = outages[-1][1]

    def last(now: float, every_s: float, phase: float) -> float:
        """The latest beat that came through."""
        number = int((now - phase) / every_s)
        while number > 0:
            sent = phase + number * every_s
            if not any(begin <= sent < end for begin, end in outages):
                return sent
            number -= 1
        return 0.0

    own_phase, their_phase = dice.uniform(0, BEAT_S), dice.uniform(0, theirs_s)
    now = 0.0
    while now < at + 20:
        own = Beats(last(now, BEAT_S, own_phase), TTL_S)
        theirs = Beats(last(now, theirs_s, their_phase), 3 * theirs_s)
        assert signs.look(now, own, {"g": theirs}) == set(), now
        now += 0.25
