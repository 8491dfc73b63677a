"""What moving an embedding costs: arena, NIXL and Valkey beside a plain copy of the same bytes in memory.

    python -m bench.store [--sizes 1,8,28,67] [--concurrency 1,8] [--seconds 8] [--json FILE]

Each process does what an encoder or a PD worker does with one embedding; with concurrency 8 eight of them
begin together, and the time is that from the first's beginning to the last's end. All ways in turn, round by
round: a ratio is the median of the rounds' own ratios to the copy. Wants a machine that does nothing else;
takes three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.store_ways import MEMCPY, ROW_BYTES, WAYS, keep, serve
from epd_bench.result import now, this_machine
from epd_cli.brokers import embedded_brokers

LEAST_ROUNDS = 5
MAXMEMORY_BYTES = 6 << 30
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """One way at one size and concurrency.

    Attributes:
        ms: Median of the rounds; ``ms_p10`` and ``ms_p90`` are their spread.
        gb_s: Of all processes together, at the median.
        to_memcpy: How many times as long as the copy, in the same round; its median.
    """

    way: str
    mb: int
    concurrency: int
    rounds: int
    ms: float
    ms_p10: float
    ms_p90: float
    gb_s: float
    to_memcpy: float


def rows_of(size: int, concurrency: int, times: Mapping[str, Sequence[float]]) -> list[Row]:
    """From the seconds of each round, by way."""
    moved = size // ROW_BYTES * ROW_BYTES * concurrency
    rows = []
    for way, taken in times.items():
        ordered = sorted(taken)
        median = statistics.median(ordered)
        ratios = [each / copy for each, copy in zip(taken, times[MEMCPY], strict=True)]
        rows.append(
            Row(
                way=way,
                mb=size // 10**6,
                concurrency=concurrency,
                rounds=len(taken),
                ms=round(median * 1e3, 2),
                ms_p10=round(ordered[(len(ordered) - 1) // 10] * 1e3, 2),
                ms_p90=round(ordered[-1 - (len(ordered) - 1) // 10] * 1e3, 2),
                gb_s=round(moved / median / 1e9, 2),
                to_memcpy=round(statistics.median(ratios), 2),
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Of one concurrency, as it stands in docs/benchmarks.md."""
    sizes = sorted({row.mb for row in rows})
    lines = [
        f"| {rows[0].concurrency} at a time | " + " | ".join(f"{mb} MB" for mb in sizes) + " |",
        "| --- |" + " --- |" * len(sizes),
    ]
    for way in dict.fromkeys(row.way for row in rows):
        cells = [next(row for row in rows if (row.way, row.mb) == (way, mb)) for mb in sizes]
        lines.append(f"| {way} | " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    return f"{row.ms:.1f} ms ({row.ms_p10:.1f}-{row.ms_p90:.1f}), x {row.to_memcpy:.1f}"


@contextlib.contextmanager
def keeper(root: Path, urls: Mapping[str, str]) -> Iterator[Any]:
    """A process that keeps embeddings in its memory; the end of its pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=keep, args=(theirs, root, urls), daemon=True)
    child.start()
    theirs.close()
    try:
        yield ours
        ours.send(None)
        child.join(ANSWER_S)
    finally:
        child.kill()
        child.join()


@contextlib.contextmanager
def processes(count: int, root: Path, urls: Mapping[str, str]) -> Iterator[list[Any]]:
    """So many processes that take orders; the ends of their pipes."""
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(count)
    pipes, children = [], []
    try:
        for number in range(count):
            ours, theirs = context.Pipe()
            child = context.Process(
                target=serve, args=(theirs, together, root, f"p{number}", urls), daemon=True
            )
            child.start()
            theirs.close()
            pipes.append(ours)
            children.append(child)
        yield pipes
        for pipe in pipes:
            pipe.send(None)
        for child in children:
            child.join(ANSWER_S)
    finally:
        for child in children:
            child.kill()
            child.join()


def measure(
    pipes: Sequence[Any], kept: Any, size: int, ways: Sequence[str], seconds: float
) -> dict[str, list[float]]:
    """Seconds of each round, by way; the first round warms up and does not count.

    Args:
        kept: The pipe of the keeper, which gets an embedding of that size.
    """
    kept.send(size)
    place = _answer(kept)
    times: dict[str, list[float]] = {way: [] for way in ways}
    ends = time.monotonic() + seconds
    number = 0
    while number <= LEAST_ROUNDS or time.monotonic() < ends:
        for way in ways:
            for pipe in pipes:
                pipe.send((way, size, place))
            spans = [_answer(pipe) for pipe in pipes]
            if number:
                times[way].append(max(end for _, end in spans) - min(begin for begin, _ in spans))
        number += 1
    return times


def _answer(pipe: Any) -> Any:
    if not pipe.poll(ANSWER_S):
        raise TimeoutError(f"a process did not answer within {ANSWER_S:.0f} s")
    return pipe.recv()


def run(sizes: Sequence[int], concurrencies: Sequence[int], seconds: float, urls: Any) -> list[Row]:
    """All sizes at all concurrencies, one after the other."""
    rows: list[Row] = []
    for count in concurrencies:
        with (
            tempfile.TemporaryDirectory(prefix="epd-bench-", dir="/dev/shm") as root,
            keeper(Path(root) / "far", urls) as kept,
            processes(count, Path(root) / "near", urls) as pipes,
        ):
            for size in sizes:
                rows += rows_of(size, count, measure(pipes, kept, size, WAYS, seconds))
                print(f"  {size // 10**6} MB x {count}: {rows[-1].rounds} rounds", file=sys.stderr)
    return rows


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.store", description=__doc__)
    parser.add_argument("--sizes", default="1,8,28,67", help="MB")
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each size and concurrency")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = [int(size) * 10**6 for size in arguments.sizes.split(",")]
    concurrencies = [int(count) for count in arguments.concurrency.split(",")]
    machine = this_machine()
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as folder:
        async with embedded_brokers(
            Path(folder), nats=False, redis_tcp=True, redis_maxmemory_bytes=MAXMEMORY_BYTES
        ) as brokers:
            urls = {"unix": brokers.redis_url, "tcp": brokers.redis.tcp_url}
            rows = await asyncio.to_thread(run, sizes, concurrencies, arguments.seconds, urls)
    print(f"{machine.processor}, {machine.cores} cores, load {machine.load_average:.1f} before")
    for count in concurrencies:
        print("\n" + table([row for row in rows if row.concurrency == count]))
    if arguments.json:
        report = {
            "machine": {name: getattr(machine, name) for name in machine.__struct_fields__},
            "date": now(),
            "rows": [asdict(row) for row in rows],
        }
        await asyncio.to_thread(arguments.json.write_text, json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
