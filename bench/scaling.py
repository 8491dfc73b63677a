"""The tables and the plot of docs/scaling.md, from measured unit costs.

python -m bench.scaling [--plot docs/images/scaling.png]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from epd_bench.builtin import RandomMm, find_workload
from epd_plan.costs import Costs
from epd_plan.needs import Needs, needs
from epd_plan.scaling import Part, Units, cluster_of, full_at, needed, parts
from epd_sim.profiles import profile_named

PROFILE = "qwen2.5-vl-7b-h100"
WORKLOAD = "azure"
ENCODERS_OF = 5
"""One worker of so many is an encoder."""

LARGEST = (1000, 4000)
SIZES = (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def looked_at(workers: int, found: Needs) -> list[Part]:
    """The parts of a cluster of so many workers."""
    encoders = max(1, round(workers / ENCODERS_OF))
    cluster = cluster_of(encoders, max(1, workers - encoders), found)
    return parts(cluster, found, Units(), through_valkey=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__)
    parser.add_argument("--plot", type=Path, help="a PNG file")
    arguments = parser.parse_args()
    workload = find_workload(WORKLOAD, RandomMm())
    found = needs(workload, 1, profile_named(PROFILE), Costs())
    cluster = cluster_of(*LARGEST, found)
    print(
        f"{WORKLOAD} on {PROFILE}: {LARGEST[0]:,} encoders and {LARGEST[1]:,} PD workers serve "
        f"{cluster.rate:,.0f} requests/s\n"
    )
    print(
        "| part | one is full at | the load of the largest cluster | so many there | what to shard |"
    )
    print("| --- | --- | --- | --- | --- |")
    for part in parts(cluster, found, Units(), through_valkey=True):
        workers = full_at(part.name, lambda count: looked_at(count, found))
        print(
            f"| {part.name} | {workers:,} workers | {part.figure} | {needed(part):,} | {part.shard} |"
        )
    if arguments.plot is not None:
        _plot(found, arguments.plot)
    return 0


def _plot(found: Needs, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.0), layout="constrained")
    axis = figure.add_subplot()
    by_size = [looked_at(size, found) for size in SIZES]
    for number, first in enumerate(by_size[0]):
        loads = [of_size[number].load for of_size in by_size]
        style = "-" if number < 7 else "--"
        axis.plot(SIZES, loads, style, label=first.name)
    axis.axhline(1.0, color="black", linewidth=1.5)
    axis.annotate("one is full", (SIZES[0], 1.15))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_ylim(1e-4, 1e3)
    axis.set_xlabel("workers, one of five an encoder")
    axis.set_ylabel("load of one, as a share of what it can do")
    axis.grid(True, alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
