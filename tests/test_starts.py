"""A service that cannot start says why in one line: what, where, and what to do. No traceback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from epd_cli.brokers import Brokers, embedded_brokers
from epd_common.bus import Bus, declare_streams
from epd_common.lifecycle import ADVICE, EXIT_FAILED, EXIT_SETTINGS
from epd_common.protocol.subjects import inbox_prefix
from epd_vllm.launch import device_problem, ranks, shared_memory_problem
from service_stack import eventually
from small_tmpfs import on_small_tmpfs

pytestmark = pytest.mark.slow  # processes of their own

SMALL_MODEL = Path(__file__).parents[1] / "models" / "shapes-qwen2vl"
MIB = 1 << 20
BOUND_S = 60.0
NOBODY = "127.0.0.1:9"  # the port of discard, on which nothing listens


@pytest.fixture(scope="module")
async def own(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Brokers]:
    async with embedded_brokers(tmp_path_factory.mktemp("starts")) as running:
        yield running


def worker_at(brokers: Brokers, folder: Path, **settings: str) -> dict[str, str]:
    return {
        "EPD_NATS_URL": brokers.nats.url_for("encoder"),
        "EPD_REDIS_URL": brokers.redis.url_for("encoder"),
        "EPD_ENGINE": "sim",
        "EPD_MODEL": "sim",
        "EPD_SIM_PROFILE": "instant",
        "EPD_ARENA_DIR": str(folder / "arena"),
        "EPD_ARENA_BYTES": str(16 * MIB),
        **settings,
    }


@contextlib.asynccontextmanager
async def service(
    role: str, environment: dict[str, str], folder: Path, command: Sequence[str] = ()
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Path]]:
    """A service as its container runs it, and the file with what it says."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("EPD_")}
    log = folder / f"{role}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(command or (sys.executable, "-m", f"epd_{role}")),
            env={**clean, "EPD_LOG_FORMAT": "text", **environment},
            stdout=output,
            stderr=output,
        )
    try:
        yield process, log
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def says(
    role: str, environment: dict[str, str], folder: Path, command: Sequence[str] = ()
) -> tuple[int, str]:
    """How a service that cannot start ends: its exit status and the line that says why."""
    async with service(role, environment, folder, command) as (process, log):
        async with asyncio.timeout(BOUND_S):
            code = await process.wait()
    text = log.read_text()
    assert "Traceback" not in text, text
    (line,) = re.findall(r"(?:service stopped|Settings that cannot be used): .*", text)
    assert text.rstrip().endswith(line), text
    if code == EXIT_FAILED:
        assert line.endswith(ADVICE)
    return code, line


# -- brokers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["gateway", "encoder"])
async def test_no_nats(own: Brokers, tmp_path: Path, role: str) -> None:
    environment = worker_at(own, tmp_path, EPD_NATS_URL=f"nats://{NOBODY}", EPD_BROKER_WAIT_S="0")
    code, line = await says(role, environment, tmp_path)
    assert code == EXIT_FAILED
    assert f"cannot connect to NATS at {NOBODY}" in line and "EPD_NATS_URL" in line


async def test_no_valkey(own: Brokers, tmp_path: Path) -> None:
    environment = worker_at(
        own, tmp_path, EPD_REDIS_URL=f"redis://{NOBODY}/0", EPD_BROKER_WAIT_S="1"
    )
    code, line = await says("encoder", environment, tmp_path)
    assert code == EXIT_FAILED
    assert "Redis does not answer" in line and "waited 1 s for it, EPD_BROKER_WAIT_S" in line


@pytest.mark.parametrize("broker", ["NATS", "REDIS"])
async def test_a_wrong_password_is_not_waited_for(
    own: Brokers, tmp_path: Path, broker: str
) -> None:
    name = f"EPD_{broker}_URL"
    environment = worker_at(own, tmp_path)
    environment[name] = re.sub(r":[0-9a-f]{32}@", ":mistyped@", environment[name])
    started = time.monotonic()
    code, line = await says("encoder", environment, tmp_path)
    assert code == EXIT_FAILED and time.monotonic() - started < 20
    assert "mistyped" not in line and name in line and "password" in line


async def test_brokers_that_come_later_are_waited_for(tmp_path: Path) -> None:
    async with embedded_brokers(tmp_path / "brokers", redis_tcp=True) as brokers:
        environment = {
            "EPD_NATS_URL": brokers.nats.url_for("gateway"),
            "EPD_REDIS_URL": brokers.redis.url_for("gateway"),
            "EPD_PORT": "0",
            "EPD_BROKER_WAIT_S": "60",
        }
        await brokers.nats.stop()
        await brokers.redis.stop()
        async with service("gateway", environment, tmp_path) as (process, log):
            await eventually(lambda: "waiting for NATS" in log.read_text(), "it says so", 30)
            await brokers.nats.start()
            await eventually(lambda: "waiting for Valkey" in log.read_text(), "and again", 30)
            await brokers.redis.start()
            await eventually(lambda: "listening on" in log.read_text(), "it serves", 30)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                assert await process.wait() == 0


async def test_a_signal_ends_the_wait(own: Brokers, tmp_path: Path) -> None:
    environment = worker_at(
        own, tmp_path, EPD_REDIS_URL=f"redis://{NOBODY}/0", EPD_BROKER_WAIT_S="600"
    )
    async with service("encoder", environment, tmp_path) as (process, log):
        await eventually(lambda: "waiting for Valkey" in log.read_text(), "it waits", 30)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            await process.wait()


# -- settings and ports -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "changed", "said"),
    [
        ("encoder", {"EPD_MODEL": None}, "EPD_MODEL is not set"),
        ("gateway", {"EPD_PORT": "eighty"}, "EPD_PORT='eighty'"),
        ("gateway", {"EPD_API_KEYS_FILE": "/nothing"}, "EPD_API_KEYS_FILE='/nothing'"),
        ("gateway", {"EPD_REDIS_URL": "valkey:6379"}, "EPD_REDIS_URL: "),
        ("gateway", {"EPD_NATS_PASSWORD_FILE": "/nothing"}, "EPD_NATS_PASSWORD_FILE='/nothing'"),
        ("gateway", {"EPD_NATS_URL": "http://nats:8000"}, "EPD_NATS_URL: URL 1 of 1 is not nats:"),
        ("gateway", {"EPD_DEADLINE_S": "inf"}, "EPD_DEADLINE_S='inf': Input should be a finite"),
        ("encoder", {"EPD_LANE_WAITS_S": "a,b,c"}, "EPD_LANE_WAITS_S='a,b,c': "),
        ("encoder", {"EPD_STORES": "disk"}, "EPD_STORES='disk': must be a comma-separated list"),
        ("pd", {"EPD_ENGINE_ARGS": "--x 'y"}, 'EPD_ENGINE_ARGS="--x \'y": it cannot be read'),
        ("encoder", {"EPD_SERVED_MODEL": "a\nb"}, "'a\\nb' cannot be a model's name"),
        ("encoder", {"EPD_SERVED_MODEL": "\u05d0" * 30}, "is too long: 180 of 175 characters"),
    ],
)
async def test_settings_that_cannot_be_used(
    own: Brokers, tmp_path: Path, role: str, changed: dict[str, str | None], said: str
) -> None:
    environment = worker_at(own, tmp_path) | changed
    given = {name: value for name, value in environment.items() if value is not None}
    code, line = await says(role, given, tmp_path)
    assert code == EXIT_SETTINGS and said in line


@pytest.mark.parametrize("there", [True, False])
async def test_more_copies_of_the_queues_than_servers(tmp_path: Path, there: bool) -> None:
    async with embedded_brokers(tmp_path / "brokers") as fresh:
        url = fresh.nats.url_for("gateway")
        environment = {
            "EPD_NATS_URL": url,
            "EPD_REDIS_URL": fresh.redis.url_for("gateway"),
            "EPD_PORT": "0",
            "EPD_NATS_REPLICAS": "2",
        }
        if there:
            async with Bus(url, name="", inbox=inbox_prefix("gateway")) as bus:
                await declare_streams(bus, max_jobs=100)
        code, line = await says("gateway", environment, tmp_path)
    assert code == EXIT_FAILED
    assert "replicas > 1 not supported" in line and "EPD_NATS_REPLICAS=2" in line


async def test_a_port_that_is_taken(own: Brokers, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        environment = {
            "EPD_NATS_URL": own.nats.url_for("gateway"),
            "EPD_REDIS_URL": own.redis.url_for("gateway"),
            "EPD_PORT": str(port),
        }
        code, line = await says("gateway", environment, tmp_path)
    assert code == EXIT_FAILED
    assert f"cannot listen on 127.0.0.1:{port}" in line and "set EPD_HOST and EPD_PORT" in line


# -- memory -----------------------------------------------------------------------------------------


async def test_an_arena_without_room(own: Brokers, tmp_path: Path) -> None:
    environment = worker_at(own, tmp_path, EPD_ARENA_BYTES=str(2048 * MIB))
    environment["EPD_ARENA_DIR"] = str(tmp_path / "shm" / "arena")
    command = on_small_tmpfs(tmp_path / "shm", 64 * MIB, (sys.executable, "-m", "epd_encoder"))
    code, line = await says("encoder", environment, tmp_path, command)
    assert code == EXIT_FAILED
    assert "has 64 MiB, and EPD_ARENA_BYTES asks for 2048" in line and "--shm-size" in line


async def test_an_arena_that_may_not_be_written_to(own: Brokers, tmp_path: Path) -> None:
    environment = worker_at(own, tmp_path, EPD_ARENA_DIR="/proc/arena")
    code, line = await says("encoder", environment, tmp_path)
    assert code == EXIT_FAILED
    assert "the arena /proc/arena cannot be used" in line and "EPD_ARENA_DIR" in line


# -- models and devices -----------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["encoder", "pd"])
async def test_no_model(own: Brokers, tmp_path: Path, role: str) -> None:
    environment = worker_at(own, tmp_path, EPD_ENGINE="vllm", EPD_MODEL="/nothing/here")
    environment["EPD_NATS_URL"] = own.nats.url_for(role)
    environment["EPD_REDIS_URL"] = own.redis.url_for(role)
    code, line = await says(role, environment, tmp_path)
    assert code == EXIT_FAILED
    assert "there is no model in '/nothing/here'" in line and "EPD_MODEL" in line


async def test_a_model_that_is_not_whole(own: Brokers, tmp_path: Path) -> None:
    shutil.copytree(SMALL_MODEL, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    environment = worker_at(own, tmp_path, EPD_ENGINE="vllm", EPD_MODEL=str(tmp_path / "model"))
    code, line = await says("encoder", environment, tmp_path)
    assert code == EXIT_FAILED and "is not whole: model.safetensors has" in line


@pytest.mark.vllm
async def test_no_gpu_for_a_vllm_that_needs_one(own: Brokers, tmp_path: Path) -> None:
    """vLLM's own look at the machine, as a build for GPUs has it, on one without."""
    program = (
        "import vllm.platforms as platforms\n"
        "platforms.vllm_version_matches_substr = lambda part: False\n"
        "from epd_encoder.__main__ import main\n"
        "main()\n"
    )
    environment = worker_at(own, tmp_path, EPD_ENGINE="vllm", EPD_MODEL=str(SMALL_MODEL))
    code, line = await says("encoder", environment, tmp_path, (sys.executable, "-c", program))
    assert code == EXIT_FAILED and "vLLM is installed for GPUs and finds none here" in line


@pytest.mark.vllm
async def test_shared_memory_that_is_too_small_for_several_processes(
    own: Brokers, tmp_path: Path
) -> None:
    environment = worker_at(
        own,
        tmp_path,
        EPD_ENGINE="vllm",
        EPD_MODEL=str(SMALL_MODEL),
        EPD_ENGINE_ARGS="--tensor-parallel-size 2",
    )
    command = on_small_tmpfs(Path("/dev/shm"), 64 * MIB, (sys.executable, "-m", "epd_encoder"))
    code, line = await says("encoder", environment, tmp_path, command)
    assert code == EXIT_FAILED and "/dev/shm has 64 MiB" in line and "shm" in line


def test_how_many_processes_an_engine_has() -> None:
    assert ranks(["--model", "m"]) == 1
    assert ranks(["--tensor-parallel-size", "4", "-pp=2"]) == 8
    assert ranks(["-tp", "auto"]) == ranks(["-tp"]) == 1


def test_one_process_needs_no_shared_memory(tmp_path: Path) -> None:
    assert shared_memory_problem(1, tmp_path) == ""
    assert shared_memory_problem(8, tmp_path / "not there") == ""
    assert device_problem(False) == "" and "nvidia-smi" in device_problem(True)
