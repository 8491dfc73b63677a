"""What the chart would start, started here: services with the variables, commands and probes of its pods."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from epd_cli.brokers import Brokers, embedded_brokers
from epd_cli.server_process import dying_with_parent
from epd_sim.answers import expected_answer
from k8s_chart import containers, environment, pod_spec, render
from k8s_policies import Object
from service_stack import CHAT, eventually, picture, request_body, text_of

pytestmark = pytest.mark.slow  # processes of its own

MODEL = "org/model-1.5"
START_S = 60.0


def values_for(brokers: Brokers) -> Object:
    """An encoder and a PD worker in one pod, on simulated engines."""
    engine = {"env": {"EPD_ENGINE": "sim", "EPD_SIM_PROFILE": "instant"}}
    server = urlsplit(brokers.nats.url)
    return {
        "brokers": {"nats": {"servers": [f"{server.hostname}:{server.port}"], "replicas": 1}},
        "gateway": {"drainNoticeS": 0},
        "models": {"default": {"source": MODEL}},
        "arena": {"stores": "arena", "bytes": 64 << 20},
        "pools": {"all": {"containers": {"encoder": engine, "pd": engine}}},
    }


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return str(listening.getsockname()[1])


def variables_of(container: Object, brokers: Brokers, arena: Path) -> dict[str, str]:
    """What the pod would see; ports and folders are this test's."""
    role = container["name"]
    password = urlsplit(brokers.nats.url_for(role)).password or ""
    found = environment(container, secrets={f"EPD_NATS_{role.upper()}_PASSWORD": password})
    found |= {"EPD_REDIS_URL": brokers.redis.url_for(role)}  # a socket
    for name, value in {
        "EPD_ARENA_DIR": str(arena),
        "EPD_PORT": free_port(),
        "EPD_METRICS_PORT": free_port(),
    }.items():
        if name in found:
            found[name] = value
    return {"PATH": os.environ["PATH"], **found}


class Running:
    """A container's process."""

    def __init__(self, container: Object, variables: dict[str, str]) -> None:
        self.container = container
        self.variables = variables
        self.process: Any = None

    async def start(self, log: Path) -> None:
        with log.open("wb") as out:
            self.process = await asyncio.create_subprocess_exec(
                *dying_with_parent(self._program(self.container["command"])),
                env=self.variables,
                stdout=out,
                stderr=out,
            )

    async def passes(self, probe: str) -> bool:
        """Whether a probe of the pod succeeds."""
        assert self.process.returncode is None, f"{self.container['name']} has ended"
        wanted: dict[str, Any] = self.container[probe]
        if "httpGet" in wanted:
            async with httpx.AsyncClient() as client:
                try:
                    answer = await client.get(self.url + wanted["httpGet"]["path"])
                except httpx.TransportError:
                    return False
            return answer.status_code == 200
        asked = await asyncio.create_subprocess_exec(
            *self._program(wanted["exec"]["command"]),
            env=self.variables,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await asked.wait() == 0

    async def end(self) -> int:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        code: int = await self.process.wait()
        return code

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.variables['EPD_PORT']}"

    def _program(self, command: list[str]) -> list[str]:
        return [str(Path(sys.executable).parent / command[0]), *command[1:]]


@asynccontextmanager
async def pods(
    objects: list[Object], folder: Path, brokers: Brokers
) -> AsyncIterator[list[Running]]:
    """All containers of the chart; the two of one pod share a folder as they would its volume."""
    async with AsyncExitStack() as stack:
        started = []
        for _, container in containers(objects):
            found = Running(container, variables_of(container, brokers, folder / "arena"))
            await found.start(folder / f"{container['name']}.log")
            stack.push_async_callback(found.end)
            started.append(found)
        yield started


async def test_what_the_chart_starts_answers_and_ends_in_time(tmp_path: Path) -> None:
    async with embedded_brokers(tmp_path / "brokers") as brokers:
        objects = render(values_for(brokers))
        async with pods(objects, tmp_path, brokers) as started:
            by_role = {found.container["name"]: found for found in started}
            assert set(by_role) == {"gateway", "encoder", "pd"}
            for found in started:
                for probe in ("startupProbe", "readinessProbe"):
                    await eventually(partial(found.passes, probe), probe, START_S)
            data = picture()
            body = request_body(MODEL, "what is it?", data)
            async with httpx.AsyncClient(base_url=by_role["gateway"].url, timeout=30) as client:
                answer = await client.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
            assert text_of(answer) == expected_answer(body, [data])
            assert answer.headers["x-epd-worker"] == by_role["pd"].variables["EPD_WORKER_ID"]
            for role in ("encoder", "pd"):  # as Prometheus asks
                port = by_role[role].variables["EPD_METRICS_PORT"]
                async with httpx.AsyncClient() as client:
                    page = await client.get(f"http://127.0.0.1:{port}/metrics")
                assert f"epd_{role}_jobs_total" in page.text
            grace_s = {
                container["name"]: pod_spec(deployment)["terminationGracePeriodSeconds"]
                for deployment, container in containers(objects)
            }
            for role in ("gateway", "encoder", "pd"):
                async with asyncio.timeout(grace_s[role]):
                    assert await by_role[role].end() == 0
