"""E+PD answers exactly as a colocated vLLM does: same tokens, log-probabilities within 1e-3."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from answers import Tokens, ask
from cases import Case, CaseMaker, text, user
from deployment import Deployment, Deployments
from media_cases import pictures, sound, sounds, text_alone, video, videos

from epd_common.client import CHAT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOLERANCE = 1e-3
MIN_RIGHT = 0.9
"""Of the questions that the trained model was taught; colocated it knows 99 of 100 (models/README.md)."""


def of_pictures_and_videos() -> Iterator[Case]:
    yield from CaseMaker(seed=1).all()
    yield from videos(random.Random(5))


MODELS = {
    "qwen2_5_vl": of_pictures_and_videos,
    "qwen3_vl": of_pictures_and_videos,
    "llava": lambda: pictures(random.Random(5)),  # whose pictures only vLLM can size
    "qwen2_audio": lambda: sounds(random.Random(5)),
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


@pytest.mark.parametrize("name", MODELS)
async def test_random_models(deployments: Deployments, name: str) -> None:
    deployment = await deployments.get(name)
    answers: dict[tuple[int, ...], str] = {}
    for case in MODELS[name]():
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


NO_SOUND = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,UklGRgAAAABXQVZF"}}


@pytest.mark.parametrize(
    ("part", "code"),
    [
        (sound(1, 0.005), "media_not_encodable"),
        (NO_SOUND, "invalid_audio"),
        (video(1), "modality_not_supported"),
    ],
)
async def test_bad_sound_fails_alone(
    deployments: Deployments, part: dict[str, Any], code: str
) -> None:
    name = "qwen2_audio"
    deployment = await deployments.get(name)
    body = {"model": name, "messages": [user(part, text("x"))], "max_tokens": 4}
    async with httpx.AsyncClient(base_url=deployment.url, timeout=60) as client:
        response = await client.post(CHAT, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)
        body["messages"] = [user(sound(9), text("x"))]
        assert (await client.post(CHAT, json=body)).status_code == 200
