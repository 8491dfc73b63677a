"""What happened between two looks, a second. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from epd_cli.top.look import Look
from epd_common.protocol import WorkerRecord

KINDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "answered": {"pd": ("answered",)},
    "failed": {"pd": ("failed", "expired")},
    "encodes": {"encoder": ("encoded",), "pd": ("encoded", "encoded_here")},
    "hits": {"encoder": ("hits",), "pd": ("hits",)},
}
"""The counters of each role that make up a rate; a hit is an encode job whose embedding was there."""

DONE: Mapping[str, tuple[str, ...]] = {
    "pd": ("answered", "handed_over"),
    "encoder": ("encoded", "hits"),
}
"""What a worker of a role is for."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the whole cluster by kind, and what each worker has done, a second."""

    all: dict[str, float] = field(default_factory=dict)
    workers: dict[str, float] = field(default_factory=dict)


def rates(before: Look, now: Look) -> Rates:
    """Rates between two looks.

    A worker that was started anew counts from zero; one that is new, or did not answer one of the two times,
    is left out.
    """
    took_s = now.at - before.at
    if took_s <= 0:
        return Rates()
    earlier = {_who(seen.record): seen.counters for seen in before.workers}
    sums: Counter[str] = Counter()
    workers = {}
    for seen in now.workers:
        record = seen.record
        past, counted = earlier.get(_who(record)), seen.counters
        if past is None or counted is None:
            continue
        for kind, by_role in KINDS.items():
            sums[kind] += sum(_grown(past, counted, name) for name in by_role.get(record.role, ()))
        done = sum(_grown(past, counted, name) for name in DONE[record.role])
        workers[f"{record.role}.{record.worker}"] = done / took_s
    return Rates({kind: sums[kind] / took_s for kind in KINDS}, workers)


def _who(record: WorkerRecord) -> tuple[str, str, int]:
    return (record.role, record.worker, record.pid)


def _grown(past: dict[str, int], now: dict[str, int], name: str) -> int:
    return max(0, now.get(name, 0) - past.get(name, 0))
