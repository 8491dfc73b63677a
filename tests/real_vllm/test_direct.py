"""Jobs straight over NATS, with the gateway stopped."""

from __future__ import annotations

import asyncio
import base64
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from deployment import ROOT, Deployment

from epd_common.client import CHAT, connect
from models import shapes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture
async def without_gateway(small: Deployment) -> AsyncIterator[Deployment]:
    gateway = next(s for s in small.stack.services if s.role == "gateway")
    gateway.signal(signal.SIGSTOP)
    yield small
    gateway.signal(signal.SIGCONT)


def pictures(folder: Path, count: int) -> tuple[list[shapes.Scene], list[Path], random.Random]:
    rng = random.Random(51)
    scenes = [shapes.random_scene(rng) for _ in range(count)]
    paths = []
    for number, scene in enumerate(scenes):
        path = folder / f"{number}.png"
        shapes.draw(scene, 112, 112, rng).save(path)
        paths.append(path)
    return scenes, paths, rng


async def run(*command: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode(), err.decode()


async def test_epd_submit(without_gateway: Deployment, tmp_path: Path) -> None:
    scenes, paths, rng = pictures(tmp_path, 2)
    question = shapes.ask(rng, scenes, "list")
    images = [word for path in paths for word in ("--image", str(path))]
    code, out, err = await run(
        sys.executable,
        "-m",
        "epd_cli",
        "submit",
        *images,
        "--text",
        question.text,
        "--state-dir",
        str(without_gateway.stack.options.state_dir),
    )
    assert code == 0, err
    assert out.strip() == question.answer
    assert "encoded, encoded" in err


async def test_client_library(without_gateway: Deployment, tmp_path: Path) -> None:
    scenes, paths, rng = pictures(tmp_path, 3)
    question = shapes.ask(rng, scenes, "describe")
    data = [path.read_bytes() for path in paths]
    stack = without_gateway.stack
    async with connect(stack.nats_url, stack.redis_url) as client:
        assert client.models() == [without_gateway.name]
        answer = await client.chat(question.text, images=data, max_tokens=24, temperature=0)
        assert answer.text == question.answer
        uri = "data:image/png;base64," + base64.b64encode(data[0]).decode()
        parts = [
            {"type": "image_url", "image_url": {"url": uri}},
            {"type": "text", "text": "What is in image #1?"},
        ]
        body = {
            "model": without_gateway.name,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": 16,
            "temperature": 0,
        }
        text = ""
        async with client.stream(CHAT, body) as chunks:
            async for chunk in chunks:
                text += chunk["choices"][0]["delta"].get("content") or ""
        assert text == f"a {scenes[0].colour} {scenes[0].shape}"


async def test_example_with_nats_and_msgpack_alone(
    without_gateway: Deployment, tmp_path: Path
) -> None:
    scenes, paths, _ = pictures(tmp_path, 1)
    code, out, err = await run(
        sys.executable,
        str(ROOT / "docs" / "examples" / "direct_nats.py"),
        "--nats",
        without_gateway.stack.nats_url,
        "What is in image #1?",
        str(paths[0]),
    )
    assert code == 0, err
    assert f"a {scenes[0].colour} {scenes[0].shape}" in out
