"""The options of ``epd bench``; apart from what it does, which imports much."""

from __future__ import annotations

import argparse
from pathlib import Path

from epd_bench.arguments import add_workload_arguments
from epd_bench.options import Search
from epd_bench.slo import PRESETS

DEFAULT_REQUESTS = 100
"""Where neither their number nor a duration is given."""


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``epd bench``."""
    target = parser.add_argument_group("the server")
    target.add_argument(
        "--url",
        default="",
        help="several with commas are asked in turn; default: the gateway that `epd up` started",
    )
    target.add_argument("--model", default="", help="default: the only one that is served")
    target.add_argument("--api-key", default="", help="default: OPENAI_API_KEY")
    target.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    load = parser.add_argument_group("what is asked")
    add_workload_arguments(load)
    load.add_argument("--seed", type=int, help="default: a random one, which is printed")
    load.add_argument("--temperature", type=float)
    load.add_argument(
        "--stop-at-eos", action="store_true", help="do not send vLLM's field `ignore_eos`"
    )
    pace = parser.add_argument_group("how fast; one of the first three")
    pace.add_argument("--rate", type=float, help="requests a second, whatever becomes of them")
    pace.add_argument("--concurrency", type=int, help="requests at a time; default: 8")
    pace.add_argument(
        "--goodput", action="store_true", help="search the highest rate within the SLO"
    )
    pace.add_argument(
        "--burstiness", type=float, default=1.0, help="1: Poisson; less: bursts; more: steady"
    )
    pace.add_argument(
        "--requests", type=int, help=f"default: {DEFAULT_REQUESTS}, without --duration"
    )
    pace.add_argument("--duration", type=float, metavar="SECONDS", help="of sending")
    pace.add_argument("--warmup", type=int, default=2, help="requests that do not count")
    pace.add_argument(
        "--slo", default="default", help=f"ttft=...,tpot=...,share=... or {', '.join(PRESETS)}"
    )
    search = Search()
    pace.add_argument(
        "--from", dest="begin", type=float, default=search.begin, help="first rate of --goodput"
    )
    pace.add_argument("--probe-s", type=float, default=search.probe_s, help="of each rate tried")
    pace.add_argument("--precision", type=float, default=search.precision, help="of the goodput")
    result = parser.add_argument_group("results")
    result.add_argument("--out", type=Path, help="folder; default: build/bench/WORKLOAD-TIME")
    result.add_argument("--no-plots", action="store_true")
