"""E+PD answers exactly as a colocated vLLM does: same tokens, log-probabilities within 1e-3."""

from __future__ import annotations

import random
import time

import httpx
import pytest
from answers import Tokens, ask
from cases import Case, CaseMaker, Part, text, user
from deployment import Deployment, Deployments
from media_cases import (
    at_rate,
    not_finite,
    pictures,
    sound,
    sound_of,
    sounds,
    text_alone,
    video,
    videos,
)

from epd_common.client import CHAT
from epd_common.ingest.body import RESPONSES
from models.clips import audio_bytes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOLERANCE = 1e-3
MIN_RIGHT = 0.9
"""Of the questions that the trained model was taught; colocated it knows 99 of 100 (models/README.md)."""


MODELS = {
    "qwen2_5_vl": videos,
    "qwen3_vl": videos,
    "llava": pictures,  # whose pictures only vLLM can size
    "qwen2_audio": sounds,
}
"""What each is shown besides the requests about pictures, if it takes both."""


NO_SOUND = b"RIFF\x00\x00\x00\x00WAVE"
BAD: dict[str, list[tuple[Part, str]]] = {
    "qwen2_5_vl": [
        (video(7, frames=1), "invalid_video"),
        (video(8, frames=120, width=1680), "media_not_encodable"),  # more rows than the model takes
        (sound(1), "modality_not_supported"),
    ],
    "qwen2_audio": [
        (sound_of(audio_bytes(1, 0.005)), "media_not_encodable"),
        (sound_of(NO_SOUND), "invalid_audio"),
        (sound_of(at_rate(audio_bytes(1), 2**31 - 1)), "invalid_audio"),
        (sound_of(not_finite()), "invalid_audio"),
        (video(1), "modality_not_supported"),
    ],
}


async def test_trained_model(small: Deployment) -> None:
    cases = list(CaseMaker(seed=1).all())
    assert len(cases) >= 40
    known = right = items = 0
    for case in cases:
        ours = await _same_as_colocated(small, case)
        items += _items(ours)
        if case.expected is not None:
            known += 1
            right += ours.text == case.expected
    assert items > 40  # the pictures did go through an encoder
    assert right / known >= MIN_RIGHT, f"{right} of {known}"


@pytest.mark.extra
@pytest.mark.parametrize("name", MODELS)
async def test_random_models(deployments: Deployments, name: str) -> None:
    deployment = await deployments.get(name)
    of_pictures = list(CaseMaker(seed=1).all()) if MODELS[name] is videos else []
    others = list(MODELS[name](random.Random(5)))
    await _same_answers(deployment, [*of_pictures, *others])
    for case in others:
        await _same_as_a_response(deployment, case)
    for part, code in BAD.get(name, ()):
        await _fails_alone(deployment, part, code)


async def _same_answers(deployment: Deployment, cases: list[Case]) -> None:
    answers: dict[tuple[int, ...], str] = {}
    for case in cases:
        ours = await _same_as_colocated(deployment, case)
        if not case.title.startswith("text only"):
            assert _items(ours) > 0
        assert answers.setdefault(tuple(ours.ids), case.title) == case.title  # the media matter
    plain = await _same_as_colocated(deployment, text_alone())
    assert _items(plain) == 0


def _items(answer: Tokens) -> int:
    return len([item for item in answer.headers.get("x-epd-items", "").split(",") if item])


async def _same_as_colocated(deployment: Deployment, case: Case) -> Tokens:
    name = deployment.name
    theirs = await ask(deployment.colocated_url, name, case.messages, stream=case.stream)
    ours = await ask(deployment.url, name, case.messages, stream=case.stream)
    assert ours.ids == theirs.ids, case.title
    assert ours.text == theirs.text, case.title
    assert ours.finish_reason == theirs.finish_reason, case.title
    assert ours.prompt_tokens == theirs.prompt_tokens, case.title
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE), case.title
    assert len(ours.logprobs) == len(ours.ids) > 0, case.title
    return ours


async def _same_as_a_response(deployment: Deployment, case: Case) -> None:
    """The same media as input of a response, where vLLM alone would take pictures and nothing else."""
    chat = await ask(deployment.url, deployment.name, case.messages, stream=False)
    parts = [
        {"type": "input_text", "text": part["text"]} if part["type"] == "text" else part
        for part in case.messages[0]["content"]
    ]
    body = {
        "model": deployment.name,
        "input": [user(*parts)],
        "max_output_tokens": 24,
        "temperature": 0,
    }
    async with httpx.AsyncClient(base_url=deployment.url, timeout=60) as client:
        response = await client.post(RESPONSES, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["usage"]["input_tokens"] == chat.prompt_tokens, case.title
    assert answer["output"][0]["content"][0]["text"] == chat.text, case.title


async def _fails_alone(deployment: Deployment, part: Part, code: str) -> None:
    body = {"model": deployment.name, "messages": [user(part, text("x"))], "max_tokens": 4}
    async with httpx.AsyncClient(base_url=deployment.url, timeout=60) as client:
        started = time.monotonic()
        response = await client.post(CHAT, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)
        assert time.monotonic() - started < 15  # it is not tried again and again
        assert len(response.json()["error"]["message"]) < 600
        body["messages"] = [user(text("x"))]
        assert (await client.post(CHAT, json=body)).status_code == 200


@pytest.mark.extra
async def test_sound_at_a_rate_that_is_hard_to_resample(deployments: Deployments) -> None:
    """vLLM's own resampler would take gigabytes, and the process with it."""
    deployment = await deployments.get("qwen2_audio")
    for rate in (11_027, 44_101):
        part = sound_of(at_rate(audio_bytes(5), rate))
        await ask(deployment.url, deployment.name, [user(part, text("x"))], stream=False)
