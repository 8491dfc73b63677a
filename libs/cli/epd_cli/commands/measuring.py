"""``epd bench`` and ``epd plan``, whose options stand in modules of their own."""

from __future__ import annotations

import argparse
import importlib.util

from epd_common.errors import EpdError


async def run_bench_here(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("aiohttp") is None:
        raise EpdError("it needs the extra `bench`: install `epdflow[bench]`")
    from epd_cli.bench import run_bench

    return await run_bench(arguments)


async def run_plan_here(arguments: argparse.Namespace) -> int:
    from epd_cli.plan import run_plan

    return await run_plan(arguments)
