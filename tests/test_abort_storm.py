"""Many cancels at once, and requesters that die: what others get, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd_cli.server_process import dying_with_parent
from epd_sim.answers import expected_answer
from leftovers import leftovers, queued
from service_stack import BOUND_S, CHAT, eventually, picture, stream_text, text_of
from sim_stack import SimStack, Time, sim_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WITHIN_S = 1.0  # invariant I11
LOADED = 4
"""Bounds hold on a machine that does other work by being so many times as long."""

TTL_S = 1.5  # three heartbeats of the stack's services
CLIENT_TTL_S = 6.0


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[SimStack]:
    async with sim_stack(nats_url, redis_url, tmp_path) as made:
        yield made


async def nothing_left(stack: SimStack, pictures: Iterable[bytes], within_s: float) -> float:
    keys = [stack.key(data) for data in pictures]
    found: dict[str, Any] = {}

    async def clean() -> bool:
        found.clear()
        found.update(await leftovers(stack, keys))
        return not found

    try:
        return await eventually(clean, "nothing is left behind", within_s)
    except AssertionError as error:
        raise AssertionError(f"{error}; left behind: {found}") from None


# -- shared keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_requests_that_share_keys_and_random_cancels(stack: SimStack, seed: int) -> None:
    """Every request that is not cancelled is answered rightly, however its neighbours go and come."""
    stack.settings["heartbeat_s"] = 2.0  # all of it is in one event loop, which is busy
    await stack.add_encoder(encoder_slots=2)
    await stack.add_encoder(encoder_slots=2)
    for _ in range(2):
        await stack.add_pd(recheck_s=300.0)  # a wake-up that is lost is not made up for
    await stack.start(encoders=0, pds=0)
    dice = random.Random(seed)
    pictures = [picture() for _ in range(48)]
    stop = asyncio.Event()

    async def stutter() -> None:
        """Encoders work now and then, so that jobs queue up."""
        while not stop.is_set():
            stack.encoder_time.passing.clear()
            await asyncio.sleep(dice.uniform(0, 0.4))
            stack.encoder_time.passing.set()
            await asyncio.sleep(dice.uniform(0, 0.01))

    async def forget() -> None:
        """Embeddings go, so that keys are ordered again and again."""
        while not stop.is_set():
            for data in dice.sample(pictures, 6):
                await stack.forget(data)
            await asyncio.sleep(0.1)

    async def request(number: int) -> str:
        chosen = dice.sample(pictures, dice.randint(1, 3))
        cancelled = dice.random() < 0.7
        after_s = dice.choice((0.02, 0.1, 0.3, 0.5))
        await asyncio.sleep(dice.uniform(0, 3))
        asking = asyncio.create_task(stack.ask(f"question {number}", *chosen))
        if cancelled:
            await asyncio.wait((asking,), timeout=after_s)
            if not asking.done():
                asking.cancel()
                await asyncio.wait((asking,))
                return "cancelled"
        response = await asking
        assert text_of(response) == expected_answer(
            stack.body(f"question {number}", *chosen), chosen
        )
        return "answered"

    stack.http.timeout = httpx.Timeout(20)
    async with asyncio.TaskGroup() as helpers:
        helpers.create_task(stutter())
        helpers.create_task(forget())
        try:
            became = Counter(await asyncio.gather(*(request(number) for number in range(200))))
        finally:
            stop.set()
    stack.encoder_time.passing.set()
    await nothing_left(stack, pictures, LOADED * WITHIN_S)
    for data in pictures:
        assert await stack.redis.hget(f"epd:v1:state:{stack.key(data)}", "state") != b"pending"
    print(became)
    assert became["cancelled"] > 50 and became["answered"] > 50


# -- requesters that die ----------------------------------------------------------------------------


class Unhurried(Time):
    """A step takes a while, so that a long answer is one."""

    async def __call__(self, seconds: float) -> None:
        await asyncio.sleep(0.005)
        await super().__call__(seconds)


def environment(**settings: str) -> dict[str, str]:
    rest = {name: value for name, value in os.environ.items() if not name.startswith("EPD_")}
    return {**rest, **settings}


@contextlib.asynccontextmanager
async def process(*arguments: str, **settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process that dies with the test."""
    command = dying_with_parent([sys.executable, *arguments])
    started = await asyncio.create_subprocess_exec(
        *command, env=environment(**settings), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def ended_with_its_requester(
    stack: SimStack, requester: asyncio.subprocess.Process, count: int, ttl_s: float
) -> None:
    """Kill it while the engine works for it and for another; its requests end, and the other's do not."""
    (pd,) = stack.pds
    data = picture()
    mine = asyncio.create_task(stack.ask("of another", data))
    await eventually(lambda: len(pd.engine._inside) == count + 1, "the engine has all of them")
    pinned = len(pd.pinned)
    assert pinned == 2, "that of the other, and theirs"
    requester.send_signal(signal.SIGKILL)
    await requester.wait()
    within_s = LOADED * (ttl_s + 1)
    took_s = await eventually(lambda: len(pd.engine._inside) == 1, "they end", within_s)
    print(f"ended {took_s:.2f} s after the kill, a time to live of {ttl_s} s")
    assert took_s > ttl_s / 3, "by the missing heartbeat, not by chance"
    await eventually(lambda: pd.pinned == [stack.key(data)], "their pins are free", WITHIN_S)

    async def slots_free() -> bool:
        return await stack.busy(pd) == 1

    await eventually(slots_free, "their slots are free")
    counters = await stack.counters(pd)
    assert (counters["cancelled"], counters["orphaned"]) == (count, count)
    stack.pd_time.passing.set()
    assert text_of(await mine) == expected_answer(stack.body("of another", data), [data])
    await nothing_left(stack, [data], BOUND_S)


@contextlib.asynccontextmanager
async def gateway_apart(
    stack: SimStack, nats_url: str, redis_url: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    """A gateway in a process of its own, that sees the workers."""
    settings = {
        "EPD_NATS_URL": nats_url,
        "EPD_REDIS_URL": redis_url,
        "EPD_PORT": "0",
        "EPD_HEARTBEAT_S": "0.5",
        "EPD_WORKER_ID": f"doomed-{stack.gateway_id}",
    }

    def url() -> str:
        view = stack.registry.view(f"gateway.doomed-{stack.gateway_id}")
        return view.record.phase if view is not None else ""

    async with (
        process("-m", "epd_gateway", **settings) as gateway,
        contextlib.AsyncExitStack() as on,
    ):
        await eventually(lambda: bool(url()), "it is registered", LOADED * BOUND_S)
        http = await on.enter_async_context(httpx.AsyncClient(base_url=url(), timeout=BOUND_S))

        async def served() -> bool:
            return (await http.get(f"/v1/models/{stack.model}")).status_code == 200

        await eventually(served, "it sees the workers")
        yield gateway, http


async def test_a_killed_gateways_requests_end(
    stack: SimStack, nats_url: str, redis_url: str
) -> None:
    stack.pd_time = Unhurried()
    await stack.start()
    body = stack.body("never ends", picture(), stream=True, max_tokens=30_000, ignore_eos=True)
    async with (
        gateway_apart(stack, nats_url, redis_url) as (gateway, http),
        contextlib.AsyncExitStack() as on,
    ):
        streams = []
        for _ in range(5):
            response = await on.enter_async_context(http.stream("POST", CHAT, json=body))
            streams.append(response.aiter_text())
            assert await anext(streams[-1])
        stack.pd_time.passing.clear()
        await ended_with_its_requester(stack, gateway, 5, TTL_S)


async def test_a_gateway_that_stood_still_says_that_its_requests_were_given_up(
    stack: SimStack, nats_url: str, redis_url: str
) -> None:
    stack.pd_time = Unhurried()
    await stack.start()
    body = stack.body("never ends", picture(), max_tokens=30_000, ignore_eos=True)
    async with gateway_apart(stack, nats_url, redis_url) as (gateway, http):
        asked = asyncio.create_task(http.post(CHAT, json=body))
        (pd,) = stack.pds
        await eventually(lambda: len(pd.engine._inside) == 1, "the engine has it")
        gateway.send_signal(signal.SIGSTOP)
        try:
            within_s = LOADED * (TTL_S + 1)
            await eventually(lambda: not pd.engine._inside, "it is given up", within_s)
        finally:
            gateway.send_signal(signal.SIGCONT)
        answer = await asked
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "requester_silent"
        assert answer.headers["retry-after"] == "1"
        body |= {"max_tokens": 8, "ignore_eos": False}
        assert (await http.post(CHAT, json=body)).status_code == 200, "it serves on"


CLIENT = """
import asyncio, json, sys
from epd_common.client import CHAT, connect

async def main():
    nats_url, redis_url, body = sys.argv[1:]
    async with connect(nats_url, redis_url) as client:
        async with client.stream(CHAT, json.loads(body)) as chunks:
            await anext(chunks)
            print("begun", flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_clients_request_ends(
    stack: SimStack, nats_url: str, redis_url: str
) -> None:
    stack.pd_time = Unhurried()
    await stack.start()
    body = stack.body("never ends", picture(), max_tokens=30_000, ignore_eos=True)
    async with process("-c", CLIENT, nats_url, redis_url, json.dumps(body)) as client:
        assert client.stdout is not None
        async with asyncio.timeout(LOADED * BOUND_S):
            assert await client.stdout.readline() == b"begun\n"
        stack.pd_time.passing.clear()
        await ended_with_its_requester(stack, client, 1, CLIENT_TTL_S)


# -- the storm --------------------------------------------------------------------------------------

STORM, LIVE = 500, 20
PROMPT_BYTES = 24_000
"""Of a live request: 6,000 tokens, three steps of the engine."""

SLOWED = 6.0
"""A step of 2,048 tokens takes 0.57 s, so a live request 1.7 s of its engine, and half of them are through in
some 9 s. What the storm costs this machine's cores, and one step that was begun for it, are small beside
that."""


async def ttfts(stack: SimStack, warm: bytes) -> list[float]:
    """Of the live requests, which begin together; their answers are right."""

    async def one(number: int) -> float:
        text = f"{number:04} " + "x" * PROMPT_BYTES
        began = time.monotonic()
        async with stack.streaming(text, warm, max_tokens=2) as response:
            pieces = response.aiter_text()
            first = await anext(pieces)
            ttft_s = time.monotonic() - began
            rest = "".join([piece async for piece in pieces])
        right = expected_answer(stack.body(text, warm, max_tokens=2), [warm])
        assert stream_text(first + rest) == right
        return ttft_s

    return sorted(await asyncio.gather(*(one(number) for number in range(LIVE))))


async def post(stack: SimStack, body: dict[str, Any]) -> asyncio.StreamWriter:
    """A request over a connection of its own, which costs the test next to nothing."""
    url, raw = stack.http.base_url, json.dumps(body).encode()
    _, writer = await asyncio.open_connection(url.host, url.port)
    lines = (f"POST {CHAT} HTTP/1.1", f"host: {url.host}", "content-type: application/json")
    head = "\r\n".join((*lines, f"content-length: {len(raw)}", "", ""))
    writer.write(head.encode() + raw)
    return writer


async def under_way(stack: SimStack, count: int) -> None:
    async def all_in() -> bool:
        return await queued(stack, "generate") == count

    await eventually(all_in, f"{count} requests are under way", 60)


async def test_fc35_an_abort_storm(stack: SimStack) -> None:
    """500 requests are cancelled within a second, wherever they are, while 20 others begin."""
    stack.encoder_time = stack.pd_time = asyncio.sleep  # type: ignore[assignment]
    stack.settings |= {"sim_profile": "qwen2.5-vl-7b-h100", "heartbeat_s": 2.0}
    for _ in range(2):
        await stack.add_encoder(encoder_slots=8, sim_time_scale=300.0)  # half a second a batch
        await stack.add_pd(sim_time_scale=SLOWED, pd_slots=64)
    await stack.start(encoders=0, pds=0)
    stack.http.timeout = httpx.Timeout(120)
    warm = picture()
    await stack.ask("warm", warm, max_tokens=1)
    quiet = await ttfts(stack, warm)
    await nothing_left(stack, [warm], BOUND_S)

    dice = random.Random(7)
    some = [picture() for _ in range(60)]
    bodies = [
        stack.body(
            f"storm {number}",
            *dice.sample(some, number % 3),
            stream=number % 2 == 0,
            max_tokens=2000,
            ignore_eos=True,
        )
        for number in range(STORM)
    ]
    storm: list[asyncio.StreamWriter] = []
    for body in bodies:
        storm.append(await post(stack, body))
        if len(storm) % 50 == 0:  # more at once would be refused, as their pictures are checked
            await under_way(stack, len(storm))
    keys = [stack.key(data) for data in some]
    before = await leftovers(stack, keys)
    live = asyncio.create_task(ttfts(stack, warm))
    began = time.monotonic()
    for number, writer in enumerate(dice.sample(storm, STORM)):
        writer.transport.abort()
        if number % 50 == 0:
            await asyncio.sleep(0.05)
    aborted_s = time.monotonic() - began
    found: dict[str, Any] = {}

    async def only_live() -> bool:
        found.clear()
        found.update(await leftovers(stack, keys))
        rest = dict(found)
        live_ones = {rest.pop(name, 0) for name in LIVES}
        rest.pop("pins", None)  # one picture, on whichever workers the live ones are
        return not rest and live_ones == {LIVE}

    took_s = await eventually(only_live, f"only the live are left, not {found}", 30)
    pinned = {key for worker in stack.pds for key in worker.pinned}
    beside = await live
    await nothing_left(stack, [*some, warm], LOADED * WITHIN_S)
    slower = statistics.median(beside) / statistics.median(quiet)
    print(f"in the storm: {before}")
    print(f"{STORM} aborted in {aborted_s:.2f} s; gone {took_s:.2f} s later")
    print(
        f"TTFT p50: quiet {statistics.median(quiet):.2f} s, beside {statistics.median(beside):.2f} s"
    )
    assert pinned <= {stack.key(warm)}
    assert took_s < LOADED * WITHIN_S
    assert slower < 1.5


LIVES = ("generate jobs", "requests in engines", "jobs in work", "open replies")
"""What a live request has one of."""
