"""Drives a PD engine with embeddings that arrive when the scenario says, and prints what happened as JSON.

    python gating_rig.py MODEL FOLDER SCENARIO,... [ENGINE_ARGUMENT ...]

A program of its own, so that vLLM runs as it does in the service. Embeddings are made once by a real
encoder engine and kept in FOLDER; each scenario pins copies of them under keys of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from unfit import UNFIT

from bench.engine_rig import Rig, engine_rig, say
from bench.rig_files import EVICTED

SEQS = 4
PREEMPTED_TOKENS = 300
ORDERS = {"first to last": (0, 1, 2), "last to first": (2, 1, 0), "mixed": (1, 2, 0)}


async def text(rig: Rig, name: str) -> float:
    """Seconds that a text request takes."""
    body = {
        "model": "rig",
        "messages": [{"role": "user", "content": "Hello."}],
        "max_tokens": 1,
    }
    started = time.perf_counter()
    answer = await rig.collect(name, body, [])
    assert answer["status"] == 200
    return time.perf_counter() - started


async def reference(rig: Rig, pictures: Sequence[int], repeat: Sequence[int]) -> dict[str, Any]:
    """The same request with all embeddings there from the start."""
    keys = rig.keys(*pictures)
    for key, picture in zip(keys, pictures, strict=True):
        await rig.pin(key, picture)
    return await rig.ask(
        f"ref{next(rig.numbers)}", [keys[i] for i in repeat], [pictures[i] for i in repeat]
    )


async def arrival_orders(rig: Rig) -> dict[str, Any]:
    """Three pictures in every order of arrival; another request runs meanwhile."""
    expected = await reference(rig, (0, 1, 2), (0, 1, 2))
    found: dict[str, Any] = {"expected": expected}
    for title, order in ORDERS.items():
        name = f"order{next(rig.numbers)}"
        keys = rig.keys(0, 1, 2)
        asking = asyncio.create_task(rig.ask(name, keys, (0, 1, 2)))
        await rig.scheduled(name, 1)
        meanwhile = await text(rig, f"meanwhile-{name}")
        for picture in order:
            await rig.pin(keys[picture], picture)
            await text(rig, f"between{picture}-{name}-")
        found[title] = {
            "answer": await asking,
            "steps": rig.steps_of(name),
            "meanwhile_s": meanwhile,
        }
    return found


async def shared_and_repeated(rig: Rig) -> dict[str, Any]:
    """A key twice in one request and in two requests at once, pinned while both wait."""
    expected = await reference(rig, (0, 1), (0, 1, 0))
    keys = rig.keys(0, 1)
    used = [keys[0], keys[1], keys[0]]
    asking = [
        asyncio.create_task(rig.ask(f"shared{n}-{next(rig.numbers)}", used, (0, 1, 0)))
        for n in range(2)
    ]
    for key, picture in zip(keys, (0, 1), strict=True):
        await asyncio.sleep(0.05)
        await rig.pin(key, picture)
    return {"expected": expected, "answers": list(await asyncio.gather(*asking))}


async def stalled(rig: Rig) -> dict[str, Any]:
    """Requests for pictures that never come: what they cost others, and the engine's process."""
    await text(rig, "warm")
    alone = sorted([await text(rig, f"alone{n}") for n in range(20)])
    waiting = [
        asyncio.create_task(rig.ask(f"never{n}", rig.keys(0), (0,))) for n in range(SEQS - 1)
    ]
    for n in range(SEQS - 1):
        await rig.scheduled(f"never{n}", 1)
    cpu, started = rig.cpu_s(), time.monotonic()
    await asyncio.sleep(2)
    idle = (rig.cpu_s() - cpu) / (time.monotonic() - started)
    beside = sorted([await text(rig, f"beside{n}") for n in range(20)])
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return {
        "alone_p50_s": alone[10],
        "beside_p50_s": beside[10],
        "idle_cpu_share": idle,
        "cancelled": all(task.cancelled() for task in waiting),
    }


async def cancelled(rig: Rig) -> dict[str, Any]:
    """What the engine holds after requests were cancelled in it: the note of the step of a text request."""
    await text(rig, "quiet")
    found = {"quiet": rig.last_step()}
    for stage in ("prefill", "decode"):
        asking = []
        for _ in range(SEQS - 1):
            name, keys = f"{stage}{next(rig.numbers)}", rig.keys(0)
            asking.append(
                asyncio.create_task(rig.ask(name, keys, (0,), max_tokens=300, ignore_eos=True))
            )
            await rig.scheduled(name, 1)  # the text before its picture is prefilled
            if stage == "decode":
                await rig.pin(keys[0], 0)
                await rig.scheduled(name, 5)
        await text(rig, f"before-{stage}")
        found[f"{stage}, before"] = rig.last_step()
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        await text(rig, f"after-{stage}")
        found[stage] = rig.last_step()
    return found


async def unfit_files(rig: Rig) -> dict[str, Any]:
    """Every kind of wrong file fails its own request, before and after others were prefilled."""
    expected = await reference(rig, (0, 1), (0, 1))
    found: dict[str, Any] = {"expected": expected}
    for title, change in UNFIT.items():
        keys = rig.keys(0, 1)
        asking = asyncio.create_task(rig.ask(f"unfit{next(rig.numbers)}", keys, (0, 1)))
        await rig.pin(keys[0], 0)
        await rig.pin(keys[1], 1, change)
        async with asyncio.timeout(20):
            answer = await asking
        found[title] = {
            "answer": answer,
            "alive": rig.engine.alive,
            "next": await reference(rig, (0, 1), (0, 1)),
        }
    return found


async def evicted_while_in_use(rig: Rig) -> dict[str, Any]:
    """The arena drops the file between the step's scheduling and its loading: the pin keeps it readable."""
    expected = await reference(rig, (0,), (0,))
    keys = rig.keys(0)
    asking = asyncio.create_task(rig.ask(f"evicted{next(rig.numbers)}", keys, (0,)))
    published = rig.folder / EVICTED / keys[0]
    published.parent.mkdir()
    published.write_bytes(rig.made[0].read_bytes())
    (rig.arena.pins / keys[0]).hardlink_to(published)
    await rig.engine.wake()
    answer = await asking
    return {"expected": expected, "answer": answer, "evicted": not published.exists()}


async def encoder_cache_reset(rig: Rig) -> dict[str, Any]:
    """The engine forgets all embeddings while requests that were half prefilled wait for the rest."""
    expected = await reference(rig, (0, 1), (0, 1))
    keys = rig.keys(0, 1)
    name = f"reset{next(rig.numbers)}"
    asking = asyncio.create_task(rig.ask(name, keys, (0, 1)))
    await rig.scheduled(name, 1)
    await rig.pin(keys[0], 0)
    await rig.scheduled(name, 2)
    await rig.engine.reset_encoder_cache()
    await rig.pin(keys[1], 1)
    answers = [await asking]
    await rig.engine.reset_encoder_cache()
    answers.append(await rig.ask(f"{name}-again", keys, (0, 1)))  # while its pins are still there
    return {"expected": expected, "answers": answers}


async def preempted(rig: Rig) -> dict[str, Any]:
    """More requests than the KV cache holds: who is preempted needs its embeddings again."""
    expected = await reference(rig, (0, 1), (0, 1))
    asking, names = [], []
    for _ in range(SEQS):
        name = f"preempted{next(rig.numbers)}"
        keys = rig.keys(0, 1)
        names.append(name)
        asking.append(
            asyncio.create_task(
                rig.ask(name, keys, (0, 1), max_tokens=PREEMPTED_TOKENS, ignore_eos=True)
            )
        )
        for key, picture in zip(keys, (0, 1), strict=True):
            await rig.pin(key, picture)
    answers = await asyncio.gather(*asking)
    restarts = sum(sum(computed == 0 for computed, _ in rig.steps_of(name)) - 1 for name in names)
    return {
        "expected": expected["ids"],
        "begins": [answer["ids"] and answer["ids"][: len(expected["ids"])] for answer in answers],
        "lengths": [len(answer["ids"] or ()) for answer in answers],
        "restarts": restarts,
    }


SCENARIOS: dict[str, Callable[[Rig], Awaitable[dict[str, Any]]]] = {
    "arrival_orders": arrival_orders,
    "shared_and_repeated": shared_and_repeated,
    "stalled": stalled,
    "cancelled": cancelled,
    "unfit_files": unfit_files,
    "evicted_while_in_use": evicted_while_in_use,
    "encoder_cache_reset": encoder_cache_reset,
    "preempted": preempted,
}


async def main(model: str, folder: Path, scenarios: Sequence[str], extra: list[str]) -> None:
    results = {}
    polling = os.environ.get("EPD_TEST_POLLING") == "1"
    async with engine_rig(
        model,
        folder,
        pictures=3,
        side=112,
        seqs=SEQS,
        sleep_when_stalled=not polling,
        extra=extra,
    ) as rig:
        for name in scenarios:
            say(name)
            results[name] = await SCENARIOS[name](rig)
        print("RESULTS " + json.dumps(results | {"alive": rig.engine.alive}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(","), sys.argv[4:]))
