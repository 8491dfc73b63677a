"""Which workload, on a command line: the same options for all commands that take one."""

from __future__ import annotations

import argparse

from epd_bench.builtin import NAMES, RandomMm, find_workload
from epd_bench.workloads import Workload


def add_workload_arguments(group: argparse._ActionsContainer) -> None:
    """The options that :func:`workload_of` reads."""
    defaults = RandomMm()
    group.add_argument(
        "--workload",
        default="random-mm",
        help=f"{', '.join(NAMES)}, or a JSON file (docs/benchmarks.md)",
    )
    group.add_argument(
        "--images", type=int, default=defaults.images, help="of random-mm, a request"
    )
    group.add_argument("--sizes", default=defaults.sizes, help="of random-mm's images")
    group.add_argument("--text", type=int, default=defaults.text, help="tokens, of random-mm")
    group.add_argument("--output", type=int, default=defaults.output, help="tokens, of random-mm")
    group.add_argument(
        "--spread", type=float, default=defaults.spread, help="of all four, as a share"
    )


def workload_of(arguments: argparse.Namespace) -> Workload:
    """The workload that was named.

    Raises:
        BenchError: there is none of that name, or its options make no sense.
    """
    return find_workload(
        arguments.workload,
        RandomMm(
            images=arguments.images,
            sizes=arguments.sizes,
            text=arguments.text,
            output=arguments.output,
            spread=arguments.spread,
        ),
    )
