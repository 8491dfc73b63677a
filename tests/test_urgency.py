"""A request's priority inside the engine."""

from __future__ import annotations

import itertools
import random

from epd_common.urgency import LONG_PROMPT, engine_priority

NOW = 1.8e9


def urgency(priority: int = 0, *, age_s: float = 0.0, tokens: int = 0, wait_s: float = 3.0) -> int:
    return engine_priority(
        priority, published=NOW - age_s, prompt_tokens=tokens, long_wait_s=wait_s
    )


def test_the_clients_priority_comes_first() -> None:
    for one, other in itertools.product((-999_999, -1, 0, 3, 999_999), repeat=2):
        oldest, youngest = urgency(one, age_s=1e9), urgency(other, tokens=LONG_PROMPT)
        assert (oldest < youngest) == (one <= other)
        assert abs(oldest) < 1 << 63, "it travels in 64 bits"


def test_then_age_and_long_prompts_count_as_younger() -> None:
    assert urgency(age_s=1.0) < urgency()
    assert urgency(tokens=8192) > urgency(), "of two that came together the short one"
    assert urgency(tokens=8192, age_s=1.4) > urgency()
    assert urgency(tokens=8192, age_s=1.6) < urgency(), "half of the wait and no more"
    assert urgency(tokens=10 * LONG_PROMPT, age_s=3.1) < urgency()


def test_without_waits_as_they_came() -> None:
    rng = random.Random(1)
    ages = [rng.random() * 100 for _ in range(50)]
    found = sorted(ages, key=lambda a: urgency(age_s=a, tokens=rng.randrange(99_999), wait_s=0))
    assert all(early > late - 0.02 for early, late in itertools.pairwise(found))
