"""E+PD answers exactly as a colocated vLLM does: same tokens, log-probabilities within 1e-3."""

from __future__ import annotations

import pytest
from answers import ask
from cases import CaseMaker
from deployment import SMALL_MODEL, Deployments

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOLERANCE = 1e-3
MIN_RIGHT = 0.9
"""Of the questions that the trained model was taught; colocated it knows 99 of 100 (models/README.md)."""


@pytest.mark.parametrize("name", [SMALL_MODEL.name, "qwen2_5_vl", "qwen3_vl"])
async def test_same_tokens_and_logprobs(deployments: Deployments, name: str) -> None:
    deployment = await deployments.get(name)
    cases = list(CaseMaker(seed=1).all())
    assert len(cases) >= 40
    known = right = images = 0
    for case in cases:
        theirs = await ask(deployment.colocated_url, name, case.messages, stream=case.stream)
        ours = await ask(deployment.url, name, case.messages, stream=case.stream)
        assert ours.ids == theirs.ids, case.title
        assert ours.text == theirs.text, case.title
        assert ours.finish_reason == theirs.finish_reason, case.title
        assert ours.prompt_tokens == theirs.prompt_tokens, case.title
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE), case.title
        assert len(ours.logprobs) == len(ours.ids) > 0, case.title
        images += len(ours.headers.get("x-epd-items", "").split(",")) * ("image" in case.title)
        if case.expected is not None and name == SMALL_MODEL.name:
            known += 1
            right += ours.text == case.expected
    assert images > 40  # the pictures did go through an encoder
    if known:
        assert right / known >= MIN_RIGHT, f"{right} of {known}"
