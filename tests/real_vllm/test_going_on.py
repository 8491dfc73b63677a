"""What a worker had that is killed goes on at another one, on real vLLM, and the answer is the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from cases import text, user
from deployment import Deployment, Deployments
from losing import (
    MOST_TOKENS,
    Lose,
    back,
    freeze,
    kill,
    kill_engine,
    long_question,
    service,
    stream,
)
from nats.aio.msg import Msg
from services import counters, health

from epd_cli.processes import ServiceProcess
from epd_common.bus import Bus
from epd_common.ingest.body import RESPONSES
from epd_common.protocol import EmbeddingEvent, decode, subjects
from models import shapes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

COMPLETIONS = "/v1/completions"


@pytest.fixture
async def two(deployments: Deployments) -> Deployment:
    return await deployments.get("shapes-qwen2vl", "two of each")


CASES: dict[str, tuple[Lose, dict[str, Any]]] = {
    "plain": (kill, {}),
    "cut off by its length": (kill_engine, {"max_tokens": 60}),
    "beyond its end": (freeze, {"ignore_eos": True, "max_tokens": 60}),
    "stop string": (freeze, {"ignore_eos": True, "max_tokens": 200, "stop": ["image #5"]}),
    "penalty, least tokens": (
        freeze,
        {"repetition_penalty": 1.3, "min_tokens": 40, "max_tokens": 60},
    ),
}


@pytest.mark.parametrize("title", CASES)
async def test_the_answer_is_that_of_one_worker(two: Deployment, title: str) -> None:
    how, options = CASES[title]
    body = long_question(2000 + len(title), **options)
    whole = await stream(two, body)
    assert whole.chunks > 12, "long enough to be interrupted"
    cut = await stream(two, body, lose=how)
    try:
        assert (cut.text, cut.finish, cut.usage) == (whole.text, whole.finish, whole.usage)
        assert not cut.error and len(cut.names) == 1
        assert (await counters(two, other_than(two, cut.worker)))["resumed"] >= 1
    finally:
        await back(two, cut.worker, how)


async def test_a_completion_goes_on(two: Deployment) -> None:
    body = {"prompt": "The shapes in the picture are", "max_tokens": 40, "ignore_eos": True}
    whole = await stream(two, body, COMPLETIONS)
    cut = await stream(two, body, COMPLETIONS, lose=freeze)
    await back(two, cut.worker, freeze)
    assert (cut.text, cut.finish, cut.usage) == (whole.text, whole.finish, whole.usage)


@pytest.mark.parametrize("options", [{"logprobs": True}, {"n": 2, "temperature": 0.5}])
async def test_what_cannot_go_on_ends_in_an_error_event(
    two: Deployment, options: dict[str, Any]
) -> None:
    body = long_question(2100, ignore_eos=True, **options)
    cut = await stream(two, body, lose=freeze)
    await back(two, cut.worker, freeze)
    assert cut.error["code"] == "worker_lost" and cut.chunks >= 5


async def response_stream(
    deployment: Deployment, parts: list[dict[str, Any]], lose: Lose | None = None
) -> tuple[list[dict[str, Any]], str]:
    """The events of a response, whose worker is lost after five pieces of text; and that worker."""
    events: list[dict[str, Any]] = []
    asked = {"model": deployment.name, "stream": True, "temperature": 0, "input": [user(*parts)]}
    if lose is not None:  # or all is generated before its worker is lost
        asked |= {"ignore_eos": True, "max_output_tokens": MOST_TOKENS}
    async with (
        httpx.AsyncClient(base_url=deployment.url, timeout=120) as client,
        client.stream("POST", RESPONSES, json=asked) as response,
    ):
        assert response.status_code == 200, await response.aread()
        worker = response.headers["x-epd-worker"]
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                deltas = sum("delta" in event for event in events)
                if lose is not None and deltas == 5:
                    lose(service(deployment, worker))
                    lose = None
    return events, worker


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types of a stream's events, which are numbered without a gap."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return [event["type"] for event in events]


def as_input(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "input_text", "text": part["text"]} if part["type"] == "text" else part


@pytest.mark.parametrize("how", [kill_engine, freeze])
async def test_a_response_that_had_begun_ends_in_an_error_event(two: Deployment, how: Lose) -> None:
    parts = long_question(2110)["messages"][0]["content"]
    events, worker = await response_stream(two, [as_input(part) for part in parts], lose=how)
    await back(two, worker, how)
    assert kinds(events).count("response.created") == 1
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "worker_lost")


async def test_a_response_that_had_not_begun_is_another_workers(two: Deployment) -> None:
    """Its engine has it and vLLM has made its first events, but nobody was told anything."""
    rng = random.Random(2120)
    scenes = [shapes.random_scene(rng) for _ in range(2)]
    known, new = (  # of one size, by which the second is in the engine before its embedding is
        {"type": "input_image", "image_url": shapes.data_uri(shapes.draw(scene, 84, 112, rng))}
        for scene in scenes
    )
    words = {"type": "input_text", "text": "Look at this picture closely. " * 12}
    question = {"type": "input_text", "text": "What is in image #1?"}
    right, _ = await response_stream(two, [words, known, question])
    encoders = [s for s in two.stack.services if s.role == "encoder"]
    for encoder in encoders:
        freeze(encoder)
    try:
        asking = asyncio.create_task(response_stream(two, [words, new, question]))
        holder = await holding(two)
        await asyncio.sleep(1.0)  # what the engine has is seen from nowhere
        kill(service(two, holder))
        await asyncio.sleep(0.2)
    finally:
        for encoder in encoders:
            encoder.signal(signal.SIGCONT)
    events, worker = await asking
    await back(two, holder, kill)
    assert worker != holder
    assert kinds(events).count("response.created") == 1
    assert events[-1]["type"] == right[-1]["type"] == "response.completed"
    said = str(events[-1]["response"]["output"])
    assert scenes[1].colour in said and scenes[1].shape in said


async def holding(deployment: Deployment) -> str:
    """The PD worker that has the one request there is."""
    pds = [s.worker_id for s in deployment.stack.services if s.role == "pd"]
    async with asyncio.timeout(20):
        while True:
            for pd in pds:
                if (await health(deployment, pd))["busy"]:
                    return pd
            await asyncio.sleep(0.05)


def other_than(deployment: Deployment, worker: str) -> str:
    pds = [service.worker_id for service in deployment.stack.services if service.role == "pd"]
    return next(pd for pd in pds if pd != worker)


# -- encoders ----------------------------------------------------------------------------------------

ACK_WAIT_S = 2.0
HICCUP_S = 1.0
"""What a loaded machine may add, by which a time is no ratio."""


def large_picture(rng: random.Random) -> dict[str, Any]:
    """One that an encoder needs a while for."""
    scene = shapes.random_scene(rng)
    uri = shapes.data_uri(shapes.draw(scene, 1120, 1120, rng))
    part = {"type": "image_url", "image_url": {"url": uri}}
    return {"messages": [user(part, text("What is in image #1?"))], "max_tokens": 24}


async def test_an_encoder_killed_in_the_middle_of_an_encode(two: Deployment) -> None:
    """The other one has the job by its missing heartbeats: 2 s and one more encode, no more."""
    rng = random.Random(2200)
    quiet = []
    for _ in range(3):
        started = time.monotonic()
        await stream(two, large_picture(rng))
        quiet.append(time.monotonic() - started)
    body = large_picture(rng)
    async with killed_in_its_encode(two) as killed:
        started = time.monotonic()
        cut = await stream(two, body)
        added = time.monotonic() - started - min(quiet)
    (encoder,) = killed
    try:
        assert added >= ACK_WAIT_S / 2, "it was killed with the job in its hands"
        # A whole request takes longer than its one encode.
        assert added <= ACK_WAIT_S + max(quiet) + HICCUP_S
        print(f"added by the killed encoder: {added:.2f} s; undisturbed {min(quiet):.2f} s")
    finally:
        await back(two, encoder.worker_id, kill)
    again = await stream(two, body)
    assert (again.text, again.usage) == (cut.text, cut.usage) and cut.text


@contextlib.asynccontextmanager
async def killed_in_its_encode(deployment: Deployment) -> AsyncIterator[list[ServiceProcess]]:
    """Kills the first encoder that says how large an item is: its vision tower runs from then on."""
    killed: list[ServiceProcess] = []

    async def on_event(message: Msg) -> None:
        event = decode(message.data, EmbeddingEvent)
        if event.state == "sized" and not killed:
            killed.append(service(deployment, event.encoder))
            kill(killed[0])

    async with Bus(deployment.stack.nats_url, name="test") as bus:
        await bus.subscribe(subjects.ready_subject("*"), on_event)
        await bus.flush()
        yield killed
