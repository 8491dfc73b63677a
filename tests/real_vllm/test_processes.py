"""A service that is killed leaves nothing behind, and comes back."""

from __future__ import annotations

import asyncio
import random
import signal

import psutil
import pytest
from answers import ask
from deployment import Deployment

from epd_common.bus import Bus, Registry
from models import shapes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

GONE_WITHIN_S = 10
BACK_WITHIN_S = 300


async def test_a_killed_encoder_takes_its_engine_with_it_and_can_be_started_again(
    small: Deployment,
) -> None:
    encoder = next(s for s in small.stack.services if s.role == "encoder")
    children = psutil.Process(encoder.pid).children(recursive=True)
    assert children  # the engine runs in a process of its own
    encoder.signal(signal.SIGKILL)
    await encoder.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, GONE_WITHIN_S)
    assert not alive

    await encoder.start()
    async with (
        Bus(small.stack.nats_url, name="test") as bus,
        Registry(bus) as registry,
        asyncio.timeout(BACK_WITHIN_S),
    ):
        while encoder.pid not in [r.pid for r in registry.ready("encoder", small.name)]:
            assert encoder.returncode is None, encoder.log_tail()
            await asyncio.sleep(0.2)
    rng = random.Random(70)
    scene = shapes.random_scene(rng)
    uri = shapes.data_uri(shapes.draw(scene, 84, 84, rng))
    question = shapes.ask(rng, [scene], "describe")
    content = [
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "text", "text": question.text},
    ]
    answer = await ask(small.url, small.name, [{"role": "user", "content": content}], stream=False)
    assert answer.text == question.answer
    assert answer.headers["x-epd-items"] == "encoded"


async def test_services_go_on_logging_when_their_engine_is_loaded(small: Deployment) -> None:
    """vLLM's application would have the root logger tell errors alone."""
    (pd,) = (s for s in small.stack.services if s.role == "pd")
    assert "pd is ready" in pd.log_path.read_text()
