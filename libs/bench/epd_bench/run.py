"""A benchmark from its options to its result."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console

from epd_bench.bodies import BodyMaker
from epd_bench.client import Client, body_maker
from epd_bench.errors import BenchError
from epd_bench.goodput import find_goodput
from epd_bench.load import run_load
from epd_bench.meter import Meter
from epd_bench.options import Options, Search
from epd_bench.page import page
from epd_bench.plots import check_plots, plots
from epd_bench.probing import Prober
from epd_bench.result import (
    PAGE,
    RESULT,
    Result,
    check_folder,
    now,
    this_machine,
    versions,
    write_folder,
)
from epd_bench.show import Progress, show
from epd_bench.summary import summarise
from epd_bench.target import Observer, use_between
from epd_bench.workloads import Request, generate

WARM_UP_SEED = 1_000_003
"""Added to the seed for requests that warm up, so that they share no picture with those that are measured."""


async def bench(options: Options, observer: Observer | None, console: Console) -> Result:
    """Measure, show, and write.

    Raises:
        BenchError: nothing can be measured; nothing was written.
    """
    if options.out is not None:
        check_folder(options.out)
        if options.with_plots:
            check_plots()
    console.print(
        f"workload {options.workload.name}, seed {options.seed}: {options.workload.about}",
        highlight=False,
        markup=False,
    )
    async with Client(options.url, api_key=options.api_key, timeout_s=options.timeout_s) as client:
        result = await _measure(options, client, observer)
    show(result, console)
    if options.out is not None:
        images = plots(result) if options.with_plots else {}
        encoded = msgspec.json.format(msgspec.json.encode(result), indent=1)
        write_folder(options.out, {RESULT: encoded, PAGE: page(result, images), **images})
        console.print(f"written to {options.out}/: {RESULT}, {PAGE}", highlight=False)
    return result


async def _measure(options: Options, client: Client, observer: Observer | None) -> Result:
    model = _choose(options.model, await client.models(), client.url)
    result = Result(
        date=now(),
        command=sys.argv,
        url=client.url,
        model=model,
        seed=options.seed,
        workload=json.loads(options.workload.model_dump_json(exclude_none=True)),
        pace=_pace(options),
        machine=this_machine(),
        versions=versions(),
    )
    bodies = body_maker(
        model, options.seed, ignore_eos=options.ignore_eos, temperature=options.temperature
    )
    bodies.pictures.prepare(options.workload.sizes)
    warming = body_maker(
        model,
        options.seed + WARM_UP_SEED,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
    )
    await _warm_up(options, client, warming)
    before = await observer.read() if observer is not None else None
    requests = generate(options.workload, options.seed)
    if options.search is not None:
        prober = _prober(options, options.search, client, bodies, requests)
        await prober.check()
        result.goodput = await find_goodput(
            prober, begin=options.search.begin, precision=options.search.precision
        )
        sent, distinct = prober.sent, len(prober.pictures)
    else:
        sent, distinct = await _run(options, client, bodies, requests, result)
    if observer is not None and before is not None:
        after = await observer.read()
        result.target = use_between(before, after, requests=sent, distinct_images=distinct)
    return result


def _prober(
    options: Options, search: Search, client: Client, bodies: BodyMaker, requests: Iterator[Request]
) -> Prober:
    return Prober(
        client=client,
        bodies=bodies,
        requests=requests,
        slo=options.slo,
        seed=options.seed,
        probe_s=search.probe_s,
        least=search.least,
        burstiness=options.pace.burstiness,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )


async def _run(
    options: Options,
    client: Client,
    bodies: BodyMaker,
    requests: Iterator[Request],
    result: Result,
) -> tuple[int, int]:
    """Run at one pace; the requests and the distinct pictures that were sent.

    Raises:
        BenchError: none of the requests was answered.
    """
    async with Meter() as meter:
        load = await run_load(client, bodies, requests, options.pace, options.seed, Progress())
        result.client = meter.read(load.sent, [outcome.late_s for outcome in load.outcomes])
    result.requests = sorted(load.outcomes, key=lambda outcome: outcome.number)
    result.summary = summarise(
        result.requests,
        lasted_s=load.lasted_s,
        distinct_images=len(load.pictures),
        slo=options.slo,
    )
    if not result.summary.answered:
        first = result.requests[0]
        raise BenchError(
            f"none of {load.sent} requests was answered: {first.failure}: {first.detail}",
            code="nothing_answered",
        )
    return load.sent, len(load.pictures)


async def _warm_up(options: Options, client: Client, bodies: BodyMaker) -> None:
    """Ask a few requests, one after the other, whose times do not count.

    Raises:
        BenchError: the first one fails, as then all would.
    """
    requests = generate(options.workload, options.seed + WARM_UP_SEED)
    for number in range(options.warm_up):
        request = next(requests)
        outcome = await client.ask(request, bodies.body(request))
        if outcome.failure and number == 0:
            raise BenchError(
                f"the first request failed ({outcome.failure}): {outcome.detail or 'no reason given'}",
                code="first_request_failed",
            )


def _pace(options: Options) -> dict[str, Any]:
    if options.search is None:
        return dataclasses.asdict(options.pace)
    return {"burstiness": options.pace.burstiness, **dataclasses.asdict(options.search)}


def _choose(model: str, there: list[str], url: str) -> str:
    if model and model not in there:
        raise BenchError(f"{url} has no model {model!r}; it has: {', '.join(there) or 'none'}")
    if not model and len(there) != 1:
        raise BenchError(
            f"{url} has {len(there)} models, name one with --model: {', '.join(there)}"
        )
    return model or there[0]
