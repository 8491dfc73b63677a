"""Which items a simulated tower encodes together: what waits, in its order. Pure policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def next_batch(waiting: deque[T], most: int, wanted: Callable[[T], bool]) -> list[T]:
    """Take the next batch off what waits, ``most`` at most; what is not wanted any more is left out."""
    batch: list[T] = []
    while waiting and len(batch) < most:
        item = waiting.popleft()
        if wanted(item):
            batch.append(item)
    return batch
