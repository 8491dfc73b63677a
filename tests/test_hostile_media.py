"""Hundreds of hostile pictures through the HTTP edge: a right answer or a 4xx, in bounded memory and time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import hostile_media
from epd_common.bus import Registry
from epd_sim.answers import expected_answer
from service_stack import CHAT, eventually, picture
from sim_stack import SimStack, sim_stack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # The simulated encoder, which runs in this process, reads headers; Pillow warns of odd EXIF data.
    pytest.mark.filterwarnings("ignore::UserWarning:PIL"),
]

PLACE = "messages[0].content[1]"
AT_ONCE = 6
GROWTH_MIB = 30
"""That the gateway's memory may grow by: less than one of these pictures takes, decoded."""

EACH_S = 20.0


@contextlib.asynccontextmanager
async def gateway_process(stack: SimStack, **settings: str) -> AsyncIterator[tuple[str, int]]:
    """A gateway as a process of its own beside the stack's: its URL and its process id."""
    name = secrets.token_hex(4)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("EPD_")}
    urls = stack._urls("gateway")
    environment |= {"EPD_NATS_URL": urls["nats_url"], "EPD_REDIS_URL": urls["redis_url"]}
    environment |= {"EPD_WORKER_ID": name, "EPD_PORT": "0", "EPD_LOG_LEVEL": "error", **settings}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epd_gateway"), env=environment
    )
    try:
        async with Registry(stack.bus) as registry:

            def url() -> str:
                found = (view.record for view in registry.workers("gateway") if view.ready)
                return next((record.phase for record in found if record.worker == name), "")

            await eventually(lambda: bool(url()), "the gateway is registered", 60)
            yield url(), process.pid
        assert process.returncode is None
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 60)


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[SimStack]:
    async with sim_stack(nats_url, redis_url, tmp_path) as running:
        await running.start()
        yield running


def peak_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


async def test_hostile_pictures(stack: SimStack) -> None:
    sent = hostile_media.pictures()
    assert len(sent) >= 200
    outcomes: Counter[int] = Counter()
    gate = asyncio.Semaphore(AT_ONCE)
    good = picture()
    limits = {"EPD_MAX_PIXELS": str(hostile_media.MAX_PIXELS)}

    async def send(hostile: hostile_media.Hostile) -> None:
        body = stack.body("what is this", good)
        url: dict[str, Any] = {"url": hostile.url}
        body["messages"][0]["content"].insert(1, {"type": "image_url", "image_url": url})
        async with gate:
            started = time.monotonic()
            answer = await http.post(CHAT, json=body)
            took_s = time.monotonic() - started
        outcomes[answer.status_code] += 1
        assert took_s < EACH_S, hostile.name
        if hostile.data is not None:
            assert answer.status_code == 200, (hostile.name, answer.text)
            text = answer.json()["choices"][0]["message"]["content"]
            assert text == expected_answer(body, [good, hostile.data]), hostile.name
        else:
            assert answer.status_code in (400, 413, 415), (hostile.name, answer.text)
            assert answer.json()["error"]["param"] == PLACE, (hostile.name, answer.text)

    async with gateway_process(stack, **limits) as (address, pid):
        async with httpx.AsyncClient(base_url=address, timeout=60) as http:
            await send(hostile_media.Hostile("to begin with", _uri(first := picture()), first))
            before = peak_mib(pid)
            async with asyncio.TaskGroup() as group:
                for hostile in sent:
                    group.create_task(send(hostile))
            assert peak_mib(pid) - before < GROWTH_MIB
            await send(hostile_media.Hostile("at the end", _uri(last := picture()), last))
    assert set(outcomes) == {200, 400, 413, 415}, outcomes


def _uri(data: bytes) -> str:
    return hostile_media.make_data_uri(data)


async def test_hostile_recordings(stack: SimStack) -> None:
    for name, modality, data in hostile_media.recordings():
        kind = f"{modality}_url"
        url = hostile_media.make_data_uri(data, f"{modality}/x")
        body = stack.body("what is this")
        body["messages"][0]["content"].insert(0, {"type": kind, kind: {"url": url}})
        answer = await stack.http.post(CHAT, json=body)
        assert answer.status_code in (400, 415), (name, answer.text)
        assert answer.json()["error"]["param"] == "messages[0].content[0]", (name, answer.text)
