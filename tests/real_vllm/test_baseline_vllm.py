"""A comparison on real vLLM: the proxy, with vLLM's own connector, says what this project says."""

from __future__ import annotations

import random

import pytest
from answers import ask
from deployment import SMALL_MODEL

from bench.baseline.systems import SERVED_MODEL, SYSTEMS, Shape
from models import shapes

pytestmark = [pytest.mark.vllm, pytest.mark.extra, pytest.mark.timeout(600)]


async def test_the_proxy_and_this_project_are_given_the_same_and_say_the_same() -> None:
    rng = random.Random(5)
    scenes = [shapes.random_scene(rng) for _ in range(4)]
    pictures = [shapes.data_uri(shapes.draw(scene, 112, 112, rng)) for scene in scenes]
    question = shapes.ask(rng, scenes, "what")
    content = [
        *({"type": "image_url", "image_url": {"url": uri}} for uri in pictures),
        {"type": "text", "text": question.text},
    ]
    for name in ("proxy", "ours"):
        async with SYSTEMS[name](
            Shape(model=str(SMALL_MODEL), encoders=1, pds=1, max_num_seqs=16)
        ) as system:
            messages = [{"role": "user", "content": content}]
            answer = await ask(system.url, SERVED_MODEL, messages, stream=True)
            assert answer.text == question.answer, name
            counts = (await system.read()).counts
            assert counts.get("encoded", 0) == (4 if name == "ours" else 0)
