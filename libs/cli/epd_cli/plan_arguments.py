"""The options of ``epd plan``; apart from what it does, which imports much."""

from __future__ import annotations

import argparse
from pathlib import Path

from epd_bench.arguments import add_workload_arguments
from epd_bench.slo import PRESETS


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``epd plan``."""
    system = parser.add_argument_group("the system")
    system.add_argument(
        "--profile",
        default="qwen2.5-vl-7b-h100",
        help="model and GPU, by their published times (docs/configuration.md, EPD_SIM_PROFILE)",
    )
    system.add_argument("--gpus", type=int, help="so many; default: as few as --rate needs")
    system.add_argument(
        "--price", default="", metavar="encoder=X,pd=Y", help="of a GPU for an hour, by role"
    )
    system.add_argument(
        "--encoder-slowdown",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="encoders' GPUs take so many times as long as the profile's",
    )
    system.add_argument("--link", default="arena", help="of embeddings: arena, valkey or rdma")
    system.add_argument("--max-num-seqs", type=int, default=64, help="sequences of an engine")
    load = parser.add_argument_group("the load")
    add_workload_arguments(load)
    load.add_argument("--rate", type=float, help="requests a second; default: the goodput")
    load.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; less: bursts")
    load.add_argument("--seed", type=int, default=1)
    load.add_argument(
        "--slo", default="default", help=f"ttft=...,tpot=...,share=... or {', '.join(PRESETS)}"
    )
    result = parser.add_argument_group("results")
    result.add_argument("--json", action="store_true")
    result.add_argument("--write", choices=("compose", "helm"), help="a file for a deployment")
    result.add_argument("--out", type=Path, help="its name; default: compose.plan.yml and the like")
