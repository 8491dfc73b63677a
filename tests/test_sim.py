"""Simulated engines in the real services, on real brokers; and ``epd up --engine sim`` as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from epd_cli.server_process import dying_with_parent
from epd_common.client import connect
from epd_common.ingest.data_uri import make_data_uri
from epd_common.store.embedding import (
    HEADER_BYTES,
    pack_header,
    payload_checksum,
    unpack_header,
)
from epd_sim.answers import expected_answer
from epd_sim.embedding import signature
from epd_sim.faults import CRASH_EXIT, FaultPlan, Faults
from epd_sim.profiles import profile_named
from service_stack import (
    BOUND_S,
    CHAT,
    eventually,
    image_part,
    picture,
    stream_text,
    text_of,
)
from sim_stack import SimStack, sim_stack

pytestmark = pytest.mark.slow  # many brokers or processes of its own

UP_BOUND_S = 60.0
H100 = "qwen2.5-vl-7b-h100"


@pytest.fixture
async def bare(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[SimStack]:
    async with sim_stack(nats_url, redis_url, tmp_path) as made:
        yield made


@pytest.fixture
async def stack(bare: SimStack) -> SimStack:
    await bare.start()
    return bare


async def ask_rightly(
    stack: SimStack, text: str, *pictures: bytes, **fields: Any
) -> httpx.Response:
    """Ask, and compare the answer with the right one."""
    response = await stack.ask(text, *pictures, **fields)
    assert text_of(response) == expected_answer(stack.body(text, *pictures, **fields), pictures)
    return response


# -- answers ---------------------------------------------------------------------------------------


async def test_text_and_pictures_are_answered_with_what_they_are(stack: SimStack) -> None:
    response = await ask_rightly(stack, "no picture", max_tokens=5)
    assert response.json()["choices"][0]["finish_reason"] == "length"
    response = await ask_rightly(stack, "two", picture(), picture())
    answer = response.json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    # The template, 2 x 6 tokens of a picture, and one of the text.
    assert answer["usage"] == {"prompt_tokens": 21, "completion_tokens": 18, "total_tokens": 39}


async def test_a_stream_has_the_events_of_vllms(stack: SimStack) -> None:
    fields = {"max_tokens": 6, "stream_options": {"include_usage": True}}
    one = picture()
    async with stack.streaming("look", one, **fields) as response:
        raw = (await response.aread()).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n\n")[:-2]]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-2:] == [None, "length"]
    assert events.pop()["usage"]["completion_tokens"] == 6
    right = expected_answer(stack.body("look", one, **fields, stream=True), [one])
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == right
    async with stack.streaming("no usage") as response:
        raw = (await response.aread()).decode()
    assert stream_text(raw) == expected_answer(stack.body("no usage"))


async def test_completions_and_choices(stack: SimStack) -> None:
    body = {"model": stack.model, "prompt": ["one", "two"], "n": 2, "max_tokens": 4}
    answer = (await stack.http.post("/v1/completions", json=body)).json()
    assert [choice["text"] for choice in answer["choices"]] == [
        expected_answer(body, choice=number) for number in range(4)
    ]
    streamed = await stack.http.post("/v1/completions", json={**body, "stream": True})
    texts = [""] * 4
    for line in streamed.text.split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in answer["choices"]]


async def test_videos_and_recordings_are_answered(stack: SimStack) -> None:
    clip = b"\x00\x00\x00\x18ftypisom" + os.urandom(40_000)
    sound = b"RIFF\x00\x00\x00\x00WAVE" + os.urandom(9_000)
    parts = [
        {"type": "video_url", "video_url": {"url": make_data_uri(clip, "video/mp4")}},
        {"type": "audio_url", "audio_url": {"url": make_data_uri(sound, "audio/wav")}},
    ]
    body = {"model": stack.model, "messages": [{"role": "user", "content": parts}]}
    response = await stack.http.post(CHAT, json=body)
    assert text_of(response) == expected_answer(body, [clip, sound])


async def test_what_vllm_would_refuse_is_refused(stack: SimStack) -> None:
    response = await stack.ask("x", max_tokens=-1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
    response = await stack.ask("x" * 4 * 32768)
    assert response.status_code == 400
    assert "maximum context length" in response.json()["error"]["message"]
    response = await stack.ask("<|image_pad|>")
    assert response.json()["error"]["code"] == "reserved_token"


async def test_a_shared_picture_is_encoded_once(stack: SimStack) -> None:
    one = picture()
    stack.encoder_time.passing.clear()
    asking = [asyncio.create_task(ask_rightly(stack, f"{n}", one)) for n in range(8)]

    async def all_wait() -> bool:
        return await stack.busy(stack.pds[0]) == len(asking)

    await eventually(all_wait, "all of them wait")
    stack.encoder_time.passing.set()
    origins = [response.headers["x-epd-items"] for response in await asyncio.gather(*asking)]
    assert sorted(origins) == ["encoded"] + ["shared"] * 7
    assert (await stack.counters(stack.encoders[0]))["encoded"] == 1


async def test_a_late_picture_does_not_hold_up_the_text_before_it(bare: SimStack) -> None:
    bare.settings["sim_profile"] = H100
    await bare.start()
    bare.encoder_time.passing.clear()
    parts = [{"type": "text", "text": "x" * 4000}, image_part(one := picture())]
    body = {
        "model": bare.model,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 1,
    }
    asking = asyncio.create_task(bare.http.post(CHAT, json=body))
    early, late = (profile_named(H100).engine_step_s(tokens, 0) for tokens in (1006, 8))
    await eventually(lambda: bare.pd_time.slept == [early], "the text is prefilled")
    assert not bare.encoder_time.slept
    bare.encoder_time.passing.set()
    assert text_of(await asking) == expected_answer(body, [one])
    assert bare.pd_time.slept == [early, late]


async def test_a_swapped_embedding_is_a_wrong_answer(stack: SimStack) -> None:
    one, other = picture(), picture()
    await ask_rightly(stack, "x", one)
    path = stack.encoders[0].arena / "data" / stack.key(one)
    raw = path.read_bytes()
    payload = signature(other) * (len(raw[HEADER_BYTES:]) // 32)
    header = msgspec.structs.replace(unpack_header(raw), checksum=payload_checksum(payload))
    swapped = path.with_name("swapped")
    swapped.write_bytes(pack_header(header) + payload)
    swapped.rename(path)
    found = text_of(await stack.ask("x", one))
    assert found != expected_answer(stack.body("x", one), [one])
    assert found == expected_answer(stack.body("x", one), [other])


# -- roles and faults ------------------------------------------------------------------------------


async def test_one_process_encodes_and_answers(bare: SimStack) -> None:
    bare.settings["ec_role"] = "ec_both"
    await bare.start(encoders=0)
    await ask_rightly(bare, "alone", picture(), picture())
    assert (await bare.counters(bare.pds[0]))["encoded"] == 2


@pytest.mark.parametrize("fault", ["sim_nan_every", "sim_hang_at"])
async def test_what_an_encoder_does_not_deliver_is_encoded_by_the_pd_worker(
    bare: SimStack, fault: str
) -> None:
    await bare.add_encoder(**{fault: 1}, drain_s=0.1)
    await bare.add_pd(local_encode="always", encode_patience_s=0.5)
    await bare.start(encoders=0, pds=0)
    await ask_rightly(bare, "x", picture())
    counters = await bare.counters(bare.pds[0])
    assert (counters["encoded_here"], counters["encoded"]) == (1, 1)


async def test_an_encoder_that_dies_leaves_its_job_to_another(bare: SimStack) -> None:
    dying = await bare.add_encoder(sim_die_at=1)
    await bare.add_pd()
    await bare.start(encoders=0, pds=0)
    asking = asyncio.create_task(ask_rightly(bare, "x", picture()))
    await eventually(dying.process.task.done, "the worker ends with its engine")
    assert "engine died" in repr(dying.process.task.exception())
    await bare.add_encoder()
    await asking


async def test_a_pd_worker_that_dies_leaves_its_request_to_another(bare: SimStack) -> None:
    dying = await bare.add_pd(sim_die_at=1)
    await bare.start(pds=0)
    asking = asyncio.create_task(ask_rightly(bare, "x", picture()))
    await eventually(dying.process.task.done, "the worker ends with its engine")
    await bare.add_pd()
    await asking


async def test_fc15_embeddings_with_wrong_rows_are_made_again(bare: SimStack) -> None:
    """Of each second encode, for pictures that are asked for once more, and through every store."""
    await bare.add_encoder(sim_wrong_rows_every=2)
    pd = await bare.add_pd()
    await bare.start(encoders=0, pds=0)
    pictures = [picture() for _ in range(6)]
    for _ in range(2):
        for one in pictures:
            await ask_rightly(bare, "x", one)
    counters = await bare.counters(pd)
    assert counters["integrity_faults"] >= counters["reordered"] >= 5


async def test_fc15_wrong_rows_each_time_end_their_request_alone(bare: SimStack) -> None:
    encoder = await bare.add_encoder(sim_wrong_rows_every=1)
    await bare.add_pd()
    await bare.start(encoders=0, pds=0)
    one = picture()
    failed, _ = await asyncio.gather(bare.ask("x", one), ask_rightly(bare, "text alone"))
    assert failed.status_code == 502
    error = failed.json()["error"]
    assert (error["code"], error["key"]) == ("encode_failed", bare.key(one))
    assert "3 attempts" in error["message"]
    assert (await bare.counters(encoder))["encoded"] == 3


@pytest.mark.parametrize("pd_arena", ["arena", "another"])
async def test_fc15_wrong_rows_that_a_store_has_are_made_again(
    bare: SimStack, pd_arena: str
) -> None:
    """They lie in the encoder's arena and in Valkey, and are announced: nobody takes them as they are."""
    encoder = await bare.add_encoder(sim_wrong_rows_every=1)
    await bare.add_pd(pd_arena)
    await bare.start(encoders=0, pds=0)
    one = picture()
    assert (await bare.ask("x", one)).status_code == 502
    encoder.engine._tower._faults = Faults(FaultPlan())
    await ask_rightly(bare, "x", one)
    await ask_rightly(bare, "x", one)


async def test_faults_are_for_the_workers_that_are_named(bare: SimStack) -> None:
    bare.settings |= {"sim_die_at": 1, "sim_fault_workers": "somebody-else"}
    await bare.start()
    await ask_rightly(bare, "x", picture())


# -- processes -------------------------------------------------------------------------------------


def process_environment(**settings: str) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("EPD_")},
        "EPD_SIM_PROFILE": "instant",
        **settings,
    }


async def test_an_encoder_process_crashes_at_its_nth_encode(
    bare: SimStack, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Without a word, so that its job comes back by its missing heartbeat alone."""
    crashing = await asyncio.create_subprocess_exec(
        *dying_with_parent([sys.executable, "-m", "epd_encoder"]),
        env=process_environment(
            EPD_NATS_URL=nats_url,
            EPD_REDIS_URL=redis_url,
            EPD_MODEL=bare.model,
            EPD_ENGINE="sim",
            EPD_ARENA_DIR=str(tmp_path / "arena"),
            EPD_HEARTBEAT_S="0.5",
            EPD_SIM_CRASH_AT="1",
        ),
    )
    try:
        await bare.start(encoders=0)
        await eventually(lambda: bare.registry.takes_encodes(bare.model), "the encoder is ready")
        one = picture()
        asking = asyncio.create_task(ask_rightly(bare, "x", one))
        async with asyncio.timeout(BOUND_S):
            assert await crashing.wait() == CRASH_EXIT
        await bare.add_encoder()
        await asking
    finally:
        if crashing.returncode is None:
            crashing.kill()
        await crashing.wait()


async def test_epd_up_with_simulated_engines_answers_many_rightly(tmp_path: Path) -> None:
    """Two encoders and two PD workers, 200 requests at once, half of them streams."""
    arguments = "up --engine sim --encoders 2 --pds 2 --port 0 --state-dir".split()
    up = await asyncio.create_subprocess_exec(
        *dying_with_parent([sys.executable, "-m", "epd_cli", *arguments, str(tmp_path)]),
        env=process_environment(),
        stdout=asyncio.subprocess.DEVNULL,
    )
    state_path = tmp_path / "state.json"
    try:
        await eventually(
            lambda: state_path.exists() or up.returncode is not None, "it is up", UP_BOUND_S
        )
        state = json.loads(state_path.read_text())
        assert state["models"] == ["sim"]
        shared = picture()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=state["gateway_url"], timeout=UP_BOUND_S, limits=limits
        ) as http:
            wrong = await asyncio.gather(*(_wrong(http, n, shared) for n in range(200)))
        assert [fault for fault in wrong if fault] == []
        async with connect(state["nats_url"], state["redis_url"]) as client:
            answer = await client.chat("direct", images=[shared], max_tokens=4)
        parts = [image_part(shared), {"type": "text", "text": "direct"}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}
        assert answer.text == expected_answer(body, [shared])
    finally:
        if up.returncode is None:
            up.send_signal(signal.SIGTERM)
    async with asyncio.timeout(UP_BOUND_S):
        assert await up.wait() == 0
    assert not state_path.exists()


async def _wrong(http: httpx.AsyncClient, number: int, shared: bytes) -> str:
    """Ask with no, one or two pictures, one of them everybody's; what was wrong with the answer."""
    pictures = [picture(), shared][: number % 3]
    parts = [*map(image_part, pictures), {"type": "text", "text": f"question {number}"}]
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 8,
        "stream": number % 2 == 0,
    }
    response = await http.post(CHAT, json=body)
    if response.status_code != 200:
        return response.text
    found = stream_text(response.text) if body["stream"] else text_of(response)
    right = expected_answer(body, pictures)
    return "" if found == right else f"{number}: {found!r} instead of {right!r}"
