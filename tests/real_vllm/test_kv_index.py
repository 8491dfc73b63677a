"""What real vLLM's prefix cache holds is known, by its KV events, and requests go there."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from deployment import ROOT, SMALL_MODEL, Deployment, Deployments

from epd_common.beginnings import beginnings_of
from epd_common.bus import Bus
from epd_common.client import CHAT
from epd_common.held_index import HeldIndex
from epd_common.placing import prefix_key
from epd_common.protocol import subjects
from epd_common.rendezvous import ranked

pytestmark = [pytest.mark.vllm, pytest.mark.extra, pytest.mark.timeout(600)]

SYSTEM = {"role": "system", "content": "the quick brown fox. " * 55}
"""Some 850 of the small model's tokens: six blocks of the nine that an engine here has for prompts."""

KNOWN_WITHIN_S = 15.0


async def test_the_engine_says_what_it_keeps_until_it_is_evicted_or_reset(tmp_path: Path) -> None:
    program = Path(__file__).with_name("kept_rig.py")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(program), str(SMALL_MODEL), str(tmp_path)),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    lines = out.decode().splitlines()
    found = [line for line in lines if line.startswith("RESULTS ")]
    assert found, "\n".join(lines[-40:])
    assert json.loads(found[0].removeprefix("RESULTS ")) == {
        "first": {"kept": [True, True], "others": 0},
        "later": {"kept": [True] * 4, "others": 0},
        "reset": 0,
        "untold": {"kept": [False, False], "others": 0},
        "again": {"kept": [True, True], "others": 0},
        "other": {"kept": [True], "others": 0},
    }


class Conversations:
    """Asks a deployment, and hears what its PD workers hold."""

    def __init__(self, deployment: Deployment, http: httpx.AsyncClient, index: HeldIndex) -> None:
        self._deployment = deployment
        self._http = http
        self._index = index
        self.pds = [s.worker_id for s in deployment.stack.services if s.role == "pd"]

    async def ask(self, *messages: dict[str, Any]) -> str:
        """The worker that answered."""
        body = {"model": self._deployment.name, "messages": messages, "max_tokens": 4}
        response = await self._http.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        worker: str = response.headers["x-epd-worker"]
        return worker

    def nearest(self, *messages: dict[str, Any]) -> str:
        """The worker that hashing names."""
        return ranked(prefix_key(CHAT, {"messages": list(messages)}, []), self.pds)[0]

    def questions(
        self, worker: str, *before: dict[str, Any], text: str
    ) -> Iterator[dict[str, Any]]:
        """Messages with which a request would go to a worker by the hash, each another one."""
        for number in itertools.count():
            asked = {"role": "user", "content": f"{number} {text}"}
            if self.nearest(*before, asked) == worker:
                yield asked

    async def holders(self, count: int, *messages: dict[str, Any]) -> list[str]:
        """Who holds these messages, once so many are known to the gateway or after a while."""
        key = beginnings_of(CHAT, {"messages": list(messages)}, [])[-1].key
        found: list[str] = []
        for _ in range(int(KNOWN_WITHIN_S / 0.1)):
            found = [worker for worker in self.pds if key in self._index.held_by(worker)]
            if len(found) == count and await self._all_known():
                return found
            await asyncio.sleep(0.1)
        return found

    async def _all_known(self) -> bool:
        """Whether the gateway knows as much as this listener."""
        lines = (await self._http.get("/metrics")).text.splitlines()
        (known,) = [
            line.split()[-1] for line in lines if line.startswith("epd_gateway_held_beginnings ")
        ]
        return len(self._index.sizes()) == len(self.pds) and float(known) == sum(
            self._index.sizes()
        )


@pytest.fixture
async def talks(deployments: Deployments) -> AsyncIterator[Conversations]:
    deployment = await deployments.get(SMALL_MODEL.name, "by prefix, little memory")
    index = HeldIndex()
    async with (
        Bus(deployment.stack.nats_url, name="test") as bus,
        httpx.AsyncClient(base_url=deployment.url, timeout=60) as http,
        bus.listening(subjects.held_subject("*"), index.on_message),
    ):
        yield Conversations(deployment, http, index)


async def test_requests_go_where_their_beginning_is_until_it_is_evicted(
    talks: Conversations,
) -> None:
    one, other = talks.pds
    questions = talks.questions(other, SYSTEM, text="is this a fox?")
    assert await talks.holders(0, SYSTEM) == []
    assert await talks.ask(SYSTEM, next(talks.questions(one, SYSTEM, text="a fox?"))) == one
    assert await talks.holders(1, SYSTEM) == [one]
    for _ in range(3):
        assert await talks.ask(SYSTEM, next(questions)) == one, "the hash names the other"
    strange = talks.questions(one, text="other things happen. " * 50)
    for _ in range(3):
        assert await talks.ask(next(strange)) == one
    assert await talks.holders(0, SYSTEM) == []
    assert await talks.ask(SYSTEM, next(questions)) == other, "nobody holds it any more"
    assert await talks.holders(1, SYSTEM) == [other]
