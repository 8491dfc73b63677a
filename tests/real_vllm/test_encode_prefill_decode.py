"""Encode, prefill and decode on engines of their own: the answers of one server, whoever is killed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import httpx
import pytest
from answers import ask
from cases import CaseMaker, picture, text, user
from deployment import KV_LEASE_S, SMALL_MODEL, Deployment, Deployments
from losing import Lose, back, freeze, kill, kill_engine, long_question, service, stream
from prometheus_client.parser import text_string_to_metric_families
from services import counters, frozen_encoder, health

from epd_common.client import CHAT
from models import shapes

pytestmark = [pytest.mark.vllm, pytest.mark.extra, pytest.mark.timeout(900)]

PREFILLS, DECODES = ("prefill-1", "prefill-2"), ("decode-1", "decode-2")
WORKERS = ("encoder-1", *PREFILLS, *DECODES)
"""In the order in which they were given their ports."""

ABORTED = 500


@pytest.fixture
async def three(deployments: Deployments) -> Deployment:
    return await deployments.get(SMALL_MODEL.name, "e+p+d")


async def counted(deployment: Deployment, *workers: str) -> Counter[str]:
    """The counters of some workers, added."""
    found: Counter[str] = Counter()
    for worker in workers:
        found.update(await counters(deployment, worker))
    return found


async def engine_metrics(deployment: Deployment, worker: str) -> dict[str, float]:
    """vLLM's own, by name, and by source where they have one."""
    port = deployment.metrics_port + WORKERS.index(worker)
    async with httpx.AsyncClient() as client:
        page = await client.get(f"http://127.0.0.1:{port}/metrics")
    return {
        sample.name + sample.labels.get("source", ""): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }


async def test_answers_are_those_of_one_server(three: Deployment) -> None:
    cases = list(CaseMaker(seed=51).all())
    assert len(cases) >= 30
    prompt_tokens = 0
    for case in cases:
        theirs = await ask(three.colocated_url, three.name, case.messages, stream=False)
        ours = await ask(three.url, three.name, case.messages, stream=case.stream)
        assert ours.ids == theirs.ids, case.title
        assert ours.text == theirs.text, case.title
        assert ours.prompt_tokens == theirs.prompt_tokens, case.title
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3), case.title
        prompt_tokens += ours.prompt_tokens
    found = await counted(three, *DECODES)
    assert (found["kv_loaded"], found["kv_lost"]) == (len(cases), 0)
    assert found["answered"] == len(cases)
    assert found["loaded_tokens"] == prompt_tokens, "decode workers computed nothing of the prompts"
    assert (await counted(three, *PREFILLS))["answered"] == 0
    by_source: Counter[str] = Counter()
    for worker in DECODES:
        by_source.update(await engine_metrics(three, worker))
    name = "vllm:prompt_tokens_by_source_total"
    assert by_source[name + "local_compute"] == 0
    assert (
        by_source[name + "external_kv_transfer"] + by_source[name + "local_cache_hit"]
        == prompt_tokens
    )


async def test_long_answers_and_other_routes(three: Deployment) -> None:
    body = {**long_question(5100, ignore_eos=True), "model": three.name, "temperature": 0}
    async with httpx.AsyncClient(timeout=60) as client:

        async def both(route: str, body: dict[str, Any]) -> tuple[Any, Any]:
            ours, theirs = [
                (await client.post(url + route, json=body)).json()
                for url in (three.url, three.colocated_url)
            ]
            return ours, theirs

        ours, theirs = await both(CHAT, body)
        assert (
            ours["choices"][0]["message"]["content"] == theirs["choices"][0]["message"]["content"]
        )
        assert ours["usage"]["completion_tokens"] == theirs["usage"]["completion_tokens"] == 400
        for prompt in ("The shapes in the picture are", [5, 6, 7, 8, 9, 10]):
            body = {"model": three.name, "prompt": prompt, "max_tokens": 30, "temperature": 0}
            ours, theirs = await both("/v1/completions", body)
            assert ours["choices"][0]["text"] == theirs["choices"][0]["text"]
        body = {"model": three.name, "input": "Describe image #1.", "temperature": 0}
        ours, theirs = await both("/v1/responses", {**body, "max_output_tokens": 20})
        assert ours["output"][0]["content"][0]["text"] == theirs["output"][0]["content"][0]["text"]
        before = await counted(three, *PREFILLS)
        several = {**_question(5101), "model": three.name, "temperature": 0.5, "n": 2}
        answer = await client.post(three.url + CHAT, json=several)
        assert len(answer.json()["choices"]) == 2
        after = await counted(three, *PREFILLS)
        assert after["answered"] - before["answered"] == 1, (
            "several answers stay where the prompt is"
        )
        refused = await client.post(
            three.url + CHAT, json={**_question(1), "model": three.name, "max_tokens": -1}
        )
        assert refused.status_code == 400


def _question(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    scene, part = picture(rng)
    return {
        "messages": [user(part, text(shapes.ask(rng, [scene], "describe").text))],
        "max_tokens": 24,
    }


async def right(three: Deployment, body: dict[str, Any]) -> None:
    """The answer is that of one server."""
    theirs = await ask(three.colocated_url, three.name, body["messages"], stream=False)
    ours = await ask(three.url, three.name, body["messages"], stream=False)
    assert ours.ids == theirs.ids


async def working(three: Deployment, *workers: str) -> str:
    """Which of these works on something; waits until one does."""
    async with asyncio.timeout(30):
        while True:
            for worker in workers:
                if (await health(three, worker))["busy"]:
                    return worker


async def test_the_prefill_worker_is_killed_while_it_prefills(three: Deployment) -> None:
    """It waits inside the engine for its picture, behind some text that is prefilled."""
    async with frozen_encoder(three):
        asking = asyncio.create_task(right(three, _question(5200)))
        victim = await working(three, *PREFILLS)
        kill(service(three, victim))
        await asyncio.wait_for(service(three, victim).wait(), 10)
    await asking
    await back(three, victim, kill)


@pytest.mark.parametrize("how", [kill, kill_engine])
async def test_the_prefill_worker_is_killed_when_it_has_handed_over(
    three: Deployment, how: Lose
) -> None:
    """The decode workers look away meanwhile; then the prompt is in nobody's memory any more."""
    await right(three, _question(5202))  # so that decode workers know the prefill worker's engine
    before = (await counted(three, *PREFILLS))["handed_over"]
    lost = (await counted(three, *DECODES))["kv_lost"]
    decoders = [service(three, worker) for worker in DECODES]
    for decoder in decoders:
        freeze(decoder)
    try:
        asking = asyncio.create_task(right(three, _question(5201)))
        async with asyncio.timeout(30):
            while (await counted(three, *PREFILLS))["handed_over"] == before:
                pass
        for worker in PREFILLS:
            how(service(three, worker))
    finally:
        for worker in DECODES:
            await back(three, worker, freeze)
    began = time.monotonic()
    await asking
    assert time.monotonic() - began < KV_LEASE_S + 4, "lost prompts are noticed within their lease"
    assert (await counted(three, *DECODES))["kv_lost"] == lost + 1
    for worker in PREFILLS:
        await back(three, worker, how)
    await right(three, _question(5203))


async def test_the_decode_worker_is_killed_in_the_middle_of_an_answer(three: Deployment) -> None:
    body = long_question(5300, ignore_eos=True)
    whole = await stream(three, body)
    cut = await stream(three, body, lose=kill)
    assert cut.worker in DECODES
    try:
        assert (cut.text, cut.finish, cut.usage) == (whole.text, whole.finish, whole.usage)
        assert not cut.error and len(cut.names) == 1
        (other,) = set(DECODES) - {cut.worker}
        assert (await counters(three, other))["resumed"] >= 1
    finally:
        await back(three, cut.worker, kill)


async def test_nothing_keeps_memory_of_prompts(three: Deployment) -> None:
    """Hundreds of requests that are given up at any moment, with a killed worker among them."""
    rng = random.Random(5400)
    bodies = [
        {
            **_question(5400 + number % 20),
            "model": three.name,
            "stream": True,
            "max_tokens": 40,
            "ignore_eos": True,
        }
        for number in range(ABORTED)
    ]
    waiting = iter(enumerate(bodies))

    async def client() -> None:
        async with httpx.AsyncClient(base_url=three.url, timeout=60) as http:
            for number, body in waiting:
                if number == ABORTED // 2:
                    kill(service(three, "decode-1"))
                try:
                    async with asyncio.timeout(rng.uniform(0.005, 0.4)):
                        async with http.stream("POST", CHAT, json=body) as response:
                            async for _ in response.aiter_bytes():
                                pass
                except (TimeoutError, httpx.HTTPError):
                    continue

    await asyncio.gather(*(client() for _ in range(12)))
    await back(three, "decode-1", kill)
    await right(three, _question(5401))

    async def held() -> dict[str, float]:
        found = {}
        for worker in (*PREFILLS, *DECODES):
            metrics = await engine_metrics(three, worker)
            found[worker] = (
                metrics["vllm:kv_cache_usage_perc"] + metrics["vllm:num_requests_running"]
            )
        return found

    async with asyncio.timeout(KV_LEASE_S * 3 + 20):
        while any((await held()).values()):  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.5)
