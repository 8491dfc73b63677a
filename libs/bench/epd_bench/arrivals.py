"""When requests come, if they do not wait for each other (open loop)."""

from __future__ import annotations

import random
from collections.abc import Iterator


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the beginning at which requests come, without an end.

    The times between them are gamma-distributed with the mean ``1 / rate``.

    Args:
        rate: Requests a second.
        burstiness: Shape of the distribution: 1 is a Poisson process, less is burstier, more is steadier
            (as in ``vllm bench serve``).
    """
    rng = random.Random(f"arrivals-{seed}")
    at = 0.0
    while True:
        at += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
        yield at
