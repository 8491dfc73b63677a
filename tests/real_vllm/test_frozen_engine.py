"""A real engine that hangs: it is noticed, its worker ends, and its request is answered by the next one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from answers import ask
from deployment import SMALL_MODEL

from epd_cli.stack import StackOptions, run_stack
from epd_common.bus import Bus
from epd_common.health import ask_health
from models import shapes

pytestmark = [pytest.mark.vllm, pytest.mark.extra, pytest.mark.timeout(900)]

STALL_S = 10.0
GONE_WITHIN_S = 120.0
"""The bound above, and the time that vLLM takes to end its frozen processes."""


def question(seed: int) -> tuple[list[dict[str, Any]], str]:
    rng = random.Random(seed)
    scene = shapes.random_scene(rng)
    uri = shapes.data_uri(shapes.draw(scene, 84, 84, rng))
    asked = shapes.ask(rng, [scene], "describe")
    content = [
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "text", "text": asked.text},
    ]
    return [{"role": "user", "content": content}], asked.answer


async def test_a_frozen_engine_ends_its_worker(tmp_path: Path) -> None:
    options = StackOptions(
        model=str(SMALL_MODEL),
        served_model="small",
        encoders=0,
        port=0,
        state_dir=tmp_path,
        environment={"EPD_STALL_S": str(STALL_S), "EPD_DEADLINE_S": "600"},
    )
    async with run_stack(options, lambda view: None) as stack:
        (pd,) = (service for service in stack.services if service.role == "pd")
        messages, right = question(71)
        answer = await ask(stack.gateway_url, "small", messages, stream=False)
        assert answer.text == right
        async with Bus(stack.nats_url, name="test") as bus:
            health: dict[str, Any] = await ask_health(bus, "pd-1")
        # An encode, the prompt, and a step for each further token: a busy engine shows that it is.
        assert health["steps"] > len(right.split())
        assert not health["owes"]

        engine = psutil.Process(pd.pid).children(recursive=True)
        for process in engine:
            process.suspend()
        messages, right = question(72)
        async with httpx.AsyncClient(base_url=stack.gateway_url, timeout=600) as http:
            body = {"model": "small", "messages": messages, "temperature": 0}
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            async with asyncio.timeout(GONE_WITHIN_S):
                assert await pd.wait() == 1
            assert "computed nothing for 10 s (EPD_STALL_S)" in pd.log_path.read_text()
            _, alive = await asyncio.to_thread(psutil.wait_procs, engine, 10)
            assert not alive
            await pd.start()
            answered = await asking
        assert answered.status_code == 200, answered.text
        assert answered.json()["choices"][0]["message"]["content"] == right
