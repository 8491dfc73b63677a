"""``epd doctor``: each finding by itself, and all of them on a machine with real brokers."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epd_cli.brokers import Brokers, NatsBroker, ValkeyBroker, embedded_brokers
from epd_cli.checks import brokers as broker_checks
from epd_cli.checks import gpu, machine, model, ports
from epd_cli.checks.finding import Finding, size
from epd_cli.doctor import line, purpose_of
from epd_common.errors import EpdError

MIB, GIB = 1 << 20, 1 << 30
SMALL_MODEL = Path(__file__).parents[1] / "models" / "shapes-qwen2vl"
NATS = broker_checks.NatsFacts((2, 15, 1), True, MIB, 0.01)
VALKEY = broker_checks.ValkeyFacts("Valkey", (9, 1, 0), GIB, MIB, "noeviction", 0.01)


def states(found: list[Finding]) -> dict[str, str]:
    for each in found:
        assert bool(each.advice) == (each.state == "wrong" or bool(each.advice)), each
    return {each.name: each.state for each in found}


# -- the machine ------------------------------------------------------------------------------------


def test_python_has_a_version_from_which_on_it_is_right() -> None:
    assert machine.python((3, 11, 0)).state == "ok"
    assert machine.python((3, 10, 9)).advice == "use Python 3.11 or later"


def test_vllm_is_wrong_only_where_an_engine_is_needed() -> None:
    missing = EpdError("vLLM is not installed: install epdflow[vllm]")
    assert machine.vllm(("0.32.0", True), needed=True).said == "0.32.0 (CPU build)"
    found = machine.vllm(missing, needed=True)
    assert (found.state, found.said, found.advice) == (
        "wrong",
        "vLLM is not installed",
        "install epdflow[vllm]",
    )
    assert machine.vllm(missing, needed=False).state == "ok"


@pytest.mark.parametrize(
    ("room", "wanted", "state", "said"),
    [
        (machine.Room(4 * GIB, 4 * GIB), 2 * GIB, "ok", "4.0 GiB free"),
        (machine.Room(2 * GIB, 2 * GIB), 2 * GIB, "note", "takes less"),
        (machine.Room(64 * MIB, 64 * MIB), 2 * GIB, "wrong", "no worker starts there"),
        (machine.Room(64 * MIB, 64 * MIB), 256 * MIB, "wrong", "no worker starts there"),
        (machine.Room(4 * GIB, GIB), 2 * GIB, "note", "others fill it"),
        (machine.Room(4 * GIB, GIB, ours_bytes=GIB), 2 * GIB, "ok", "1.0 GiB free"),
        (machine.Room(4 * GIB, 4 * GIB, "ext4"), 2 * GIB, "note", "slower than memory"),
        (machine.Room(math.inf, math.inf), 2 * GIB, "ok", "without a bound"),
        (machine.Room(4 * GIB, 4 * GIB, usable=False), 2 * GIB, "wrong", "may not make it"),
    ],
)
def test_the_arena_needs_room(room: machine.Room, wanted: int, state: str, said: str) -> None:
    found = machine.arena(Path("/dev/shm/x"), room, wanted)
    assert (found.state, said in found.said) == (state, True), found
    assert (found.state == "ok") == (found.advice == "")


def test_shared_memory_and_open_files() -> None:
    assert machine.shared_memory(machine.Room(64 * MIB, 64 * MIB)).state == "note"
    assert machine.shared_memory(machine.Room(GIB, GIB)).state == "ok"
    assert [machine.open_files(*each).state for each in ((256, 1024), (1024, 4096), (-1, -1))] == [
        "wrong",
        "note",
        "ok",
    ]


def test_the_file_system_of_a_folder_that_is_not_there_yet() -> None:
    room = machine.room_of(Path("/dev/shm/epd-nobody/made/this"))
    assert room.kind == "tmpfs" and room.size_bytes > 0 and room.ours_bytes == 0 and room.usable
    assert not machine.room_of(Path("/proc/not/this")).usable
    assert not machine.room_of(Path(__file__)).usable


def test_sizes_are_written_as_people_do() -> None:
    assert [size(each) for each in (17, 2048, 64 * MIB, 3 * GIB)] == [
        "17 bytes",
        "2 KiB",
        "64 MiB",
        "3.0 GiB",
    ]


# -- ports ------------------------------------------------------------------------------------------


def test_who_holds_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        holder = ports.holder_of(number)
        assert holder is not None and holder.pid == os.getpid()
        assert Path(sys.executable).name in holder.command or "pytest" in holder.command
        found = ports.port(number, "EPD_PORT", holder, own_pids=set())
        assert found.state == "wrong" and f"process {os.getpid()}" in found.said
        assert "set EPD_PORT" in found.advice
        assert ports.port(number, "EPD_PORT", holder, own_pids={os.getpid()}).state == "ok"
    assert ports.holder_of(number) is None
    assert ports.port(number, "EPD_PORT", None, own_pids=set()).said == "free"


def test_a_port_of_another_user_is_wrong_all_the_same() -> None:
    found = ports.port(8000, "EPD_PORT", ports.Holder(0), own_pids=set())
    assert (found.state, found.said) == ("wrong", "held by a process of another user")


# -- the model --------------------------------------------------------------------------------------


def test_a_model_is_found_by_path_and_in_the_hubs_cache(tmp_path: Path) -> None:
    assert model.look_at_model(str(SMALL_MODEL), {}).state == "ok"
    for age, name in enumerate(("old", "new")):
        snapshot = tmp_path / "hub" / "models--of--somebody" / "snapshots" / name
        snapshot.mkdir(parents=True)
        os.utime(snapshot, (age, age))
    cached = {"HF_HOME": str(tmp_path)}
    assert model.folder_of("of/somebody", cached) == snapshot
    found = model.look_at_model("of/somebody", cached)
    assert found.state == "wrong" and "no config.json" in found.said


@pytest.mark.parametrize(
    ("name", "environment", "state"),
    [
        ("of/nobody", {}, "note"),
        ("of/nobody", {"HF_HUB_OFFLINE": "1"}, "wrong"),
        ("/not/here", {}, "wrong"),
    ],
)
def test_a_model_that_is_not_here(
    tmp_path: Path, name: str, environment: dict[str, str], state: str
) -> None:
    found = model.look_at_model(name, {"HF_HOME": str(tmp_path), **environment})
    assert found.state == state and found.advice


# -- GPUs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "needed", "state", "said"),
    [
        (gpu.Gpus(None, "no NVIDIA driver"), False, "ok", "not needed"),
        (gpu.Gpus(None, "no NVIDIA driver"), True, "wrong", "no NVIDIA driver"),
        (gpu.Gpus([]), True, "wrong", "none"),
        (gpu.Gpus(["H200, 570.1, 140 GiB"], "", "12.9", 1), True, "ok", "torch (12.9) sees 1"),
        (gpu.Gpus(["H200"], "", "12.9", 0), True, "wrong", "sees none"),
        (gpu.Gpus(["H200"], "", "", 0), True, "wrong", "CPU build"),
        (gpu.Gpus(["H200"], "", "", None), True, "note", "could not be asked"),
        (gpu.Gpus(None, "no NVIDIA driver", "6.4", 2), True, "ok", "sees 2"),
    ],
)
def test_a_gpu_is_needed_by_a_vllm_for_gpus(
    found: gpu.Gpus, needed: bool, state: str, said: str
) -> None:
    seen = gpu.gpu(found, needed=needed)
    assert (seen.state, said in seen.said) == (state, True), seen
    assert (seen.state == "ok") == (seen.advice == "")


def test_what_the_driver_says_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program.write_text("#!/bin/sh\necho 'H200, 570.1, 143771 MiB'\n")
    program.chmod(0o755)
    assert gpu.look_at_gpus(ask_torch=False).devices == ["H200, 570.1, 143771 MiB"]
    program.write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
    assert gpu.look_at_gpus(ask_torch=False) == gpu.Gpus(None, "no devices were found")
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no nvidia-smi" in gpu.look_at_gpus(ask_torch=False).problem


# -- brokers ----------------------------------------------------------------------------------------


def test_nats_as_it_should_be() -> None:
    found = broker_checks.nats_server("h:4222", NATS)
    assert states(found) == {"NATS": "ok", "JetStream": "ok", "max_payload": "ok"}


@pytest.mark.parametrize(
    ("facts", "wrong"),
    [
        (broker_checks.NatsFacts((2, 11, 9), True, MIB), "NATS"),
        (broker_checks.NatsFacts((2, 15, 1), False, MIB), "JetStream"),
        (broker_checks.NatsFacts((2, 15, 1), True, 65536), "max_payload"),
        (EpdError("cannot connect to NATS at h:4222"), "NATS"),
    ],
)
def test_what_is_wrong_with_nats(facts: broker_checks.NatsFacts | EpdError, wrong: str) -> None:
    found = broker_checks.nats_server("h:4222", facts)
    assert [each.name for each in found if each.state == "wrong"] == [wrong]
    assert all(each.advice for each in found if each.state == "wrong")


@pytest.mark.parametrize(
    ("changed", "name", "state"),
    [
        ({}, "maxmemory", "ok"),
        ({"policy": "allkeys-lru"}, "maxmemory", "wrong"),
        ({"maxmemory_bytes": 0}, "maxmemory", "note"),
        ({"used_bytes": GIB - MIB}, "maxmemory", "note"),
        ({"name": "Redis", "version": (6, 2, 1)}, "Valkey", "note"),
        ({"name": "Redis", "version": (7, 0, 1)}, "Valkey", "ok"),
    ],
)
def test_valkeys_settings(changed: dict[str, Any], name: str, state: str) -> None:
    facts = broker_checks.ValkeyFacts(
        **{field: getattr(VALKEY, field) for field in VALKEY.__slots__} | changed
    )
    assert states(broker_checks.valkey_server("h:6379", facts))[name] == state


def test_a_valkey_that_does_not_answer() -> None:
    (found,) = broker_checks.valkey_server("h:6379", EpdError("Redis does not answer"))
    assert (found.state, found.said) == ("wrong", "Redis does not answer")


@pytest.mark.parametrize(
    ("skew_s", "state", "said"),
    [
        (None, "note", "not known"),
        (0.2, "ok", "within"),
        (3.0, "wrong", "3.0 s ahead of"),
        (-3.0, "wrong", "3.0 s behind"),
    ],
)
def test_clocks(skew_s: float | None, state: str, said: str) -> None:
    found = broker_checks.clock("NATS", skew_s)
    assert (found.state, said in found.said) == (state, True)


# -- all of it --------------------------------------------------------------------------------------


def test_what_a_machine_is_for() -> None:
    assert purpose_of({}) == "up"
    assert purpose_of({"EPD_NATS_URL": "nats://h"}) == "gateway"
    assert purpose_of({"EPD_NATS_URL": "nats://h", "EPD_MODEL": "m"}) == "worker"


def test_no_name_drives_the_terminal() -> None:
    shown = line(Finding("port", "wrong", "held by \x1b[2Jevil\n", "stop\rit"))
    assert "\x1b" not in shown and "\r" not in shown and shown.count("\n") == 1
    assert line(Finding("a", "ok", "b"), colours=True).startswith("\x1b[32mok")


async def run_doctor(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("EPD_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "epd_cli", "doctor", "--state-dir", str(folder), *arguments),
        env={**clean, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def gateway_at(brokers: Brokers, role: str = "gateway") -> dict[str, str]:
    return {
        "EPD_NATS_URL": brokers.nats.url_for(role),
        "EPD_REDIS_URL": brokers.redis.url_for(role),
        "EPD_PORT": "0",
    }


@pytest.mark.slow
@pytest.mark.parametrize("role", ["gateway", "encoder", "pd", "operator"])
async def test_in_a_services_environment_with_its_rights(
    own: Brokers, tmp_path: Path, role: str
) -> None:
    code, out, err = await run_doctor(
        tmp_path, "--json", "--for", "gateway", **gateway_at(own, role)
    )
    told = json.loads(out)
    assert (code, told["ok"]) == (0, True), out
    found = {each["name"]: each["state"] for each in told["findings"]}
    assert found["NATS"] == found["JetStream"] == found["maxmemory"] == "ok"
    assert found["clock of Valkey"] == "ok"
    assert "permissions violation" not in err.lower()
    for url in gateway_at(own, role).values():
        assert url == "0" or url.split(":")[2].partition("@")[0] not in out


@pytest.fixture(scope="module")
async def own(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Brokers]:
    async with embedded_brokers(tmp_path_factory.mktemp("doctor")) as running:
        yield running


@pytest.mark.slow
async def test_brokers_that_are_set_up_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bare(NatsBroker):
        def _config(self) -> str:
            whole = super()._config().replace("max_payload: 1MB", "max_payload: 64KB")
            return whole[: whole.index("jetstream {")]

    class Evicting(ValkeyBroker):
        def _config(self) -> str:
            return super()._config().replace("noeviction", "allkeys-lru")

    monkeypatch.setattr("epd_cli.brokers.NatsBroker", Bare)
    monkeypatch.setattr("epd_cli.brokers.ValkeyBroker", Evicting)
    async with embedded_brokers(tmp_path / "brokers") as brokers:
        code, out, _ = await run_doctor(tmp_path, "--json", **gateway_at(brokers))
    wrong = {each["name"] for each in json.loads(out)["findings"] if each["state"] == "wrong"}
    assert (code, wrong) == (1, {"JetStream", "max_payload", "maxmemory"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("purpose", "setting"),
    [
        ("gateway", {"EPD_DEADLINE_S": "soon"}),
        ("worker", {"EPD_ARENA_BYTES": "2Gi"}),
        ("worker", {"EPD_MAX_NUM_SEQS": "0"}),
        ("up", {"EPD_PLACEMENT": "near"}),
    ],
)
async def test_settings_that_a_service_would_not_take(
    own: Brokers, tmp_path: Path, purpose: str, setting: dict[str, str]
) -> None:
    environment = gateway_at(own) | {"EPD_MODEL": str(SMALL_MODEL)} | setting
    code, out, err = await run_doctor(tmp_path, "--json", "--for", purpose, **environment)
    (wrong,) = [each for each in json.loads(out)["findings"] if each["state"] == "wrong"]
    [(name, value)] = setting.items()
    assert (code, wrong["name"]) == (1, "settings"), err
    assert wrong["said"].startswith(f"{name}={value!r}: ") and "; " not in wrong["said"]


@pytest.mark.slow
async def test_a_service_that_is_told_of_nats_alone_takes_the_usual_valkey(
    own: Brokers, tmp_path: Path
) -> None:
    (tmp_path / "state.json").write_text(
        json.dumps({"nats_url": "nats://h", "redis_url": own.redis_url, "processes": []})
    )
    environment = {"EPD_NATS_URL": own.nats.url_for("gateway")}
    _, out, _ = await run_doctor(tmp_path, "--json", "--for", "gateway", **environment)
    (valkey,) = [each for each in json.loads(out)["findings"] if each["name"] == "Valkey"]
    assert "127.0.0.1:6379" in valkey["said"]


@pytest.mark.slow
async def test_a_wrong_password_is_seen_and_not_shown(own: Brokers, tmp_path: Path) -> None:
    wrong = {
        name: url.replace(url.split(":")[2].partition("@")[0], "mistyped")
        for name, url in gateway_at(own).items()
        if url != "0"
    }
    code, out, err = await run_doctor(tmp_path, **wrong)
    assert code == 1 and "mistyped" not in out + err
    assert "Authorization Violation" in out and "refuses the login" in out
    assert out.count("->") >= 2 and "Traceback" not in err


@pytest.mark.slow
async def test_a_machine_where_nothing_runs(tmp_path: Path) -> None:
    code, out, _ = await run_doctor(tmp_path, "--model", str(SMALL_MODEL), EPD_PORT="0")
    assert code == 0, out
    for name in ("Python", "vLLM", "arena", "NATS program", "Valkey program", "model", "GPU"):
        assert f"ok     {name}" in out or f"note   {name}" in out, out
    assert "0 wrong" in out


@pytest.mark.slow
async def test_a_worker_whose_model_is_cut_short(own: Brokers, tmp_path: Path) -> None:
    shutil.copytree(SMALL_MODEL, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    environment = gateway_at(own, "encoder") | {
        "EPD_MODEL": str(tmp_path / "model"),
        "EPD_ARENA_DIR": "/dev/shm/epd-doctor-test",
    }
    code, out, _ = await run_doctor(tmp_path, "--json", **environment)
    told = json.loads(out)
    assert (code, told["for"]) == (1, "worker")
    (wrong,) = [each for each in told["findings"] if each["state"] == "wrong"]
    assert wrong["name"] == "model" and "model.safetensors has 1000 bytes of" in wrong["said"]


async def test_it_needs_no_more_packages_than_a_service_has(tmp_path: Path) -> None:
    """As in the gateway's image: neither what draws tables nor what lists processes."""
    program = (
        "import sys\n"
        "for name in ('rich', 'psutil', 'numpy', 'aiohttp', 'matplotlib', 'vllm', 'torch'):\n"
        "    sys.modules[name] = None\n"
        "from epd_cli.__main__ import main\n"
        f"sys.argv = ['epd', 'doctor', '--state-dir', {str(tmp_path)!r}, '--for', 'gateway', '--json']\n"
        "main()\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("EPD_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        env={**clean, "EPD_PORT": "0"},
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert json.loads(out)["ok"] is True and process.returncode == 0
