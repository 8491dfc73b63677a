"""The compose file on a real Docker engine: built, started, asked over HTTP and NATS, taken down.

Needs `docker` with its compose and buildx plugins; `deploy/docker_engine.sh` makes an engine on a
bare machine. Where there is none, the tests are skipped.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import itertools
import json
import os
import random
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgpack
import nats
import pytest

from epd_cli.dashboards import DASHBOARDS
from models import shapes
from promql import answers

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
PROJECT = "epdflow-test"
SERVICES = {"gateway", "encoder", "pd", "nats", "valkey", "prometheus"}
GRAFANA, JAEGER = "grafana/grafana:12.1.0", "jaegertracing/jaeger:2.8.0"
MODEL = "shapes-qwen2vl"
# The images are built from nothing in about 3 minutes on two cores, and vLLM starts in 1 or 2.
BUILD_S, START_S = 1200, 420

pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUILD_S + START_S + 120)]


def compose(
    *arguments: str, env: dict[str, str], timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    command = ["docker", "compose", "-p", PROJECT, "-f", str(DEPLOY / "docker-compose.yml")]
    return subprocess.run(
        [*command, "--env-file", "/dev/null", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def example() -> dict[str, str]:
    """The settings of deploy/.env.example."""
    lines = (DEPLOY / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def has_image(name: str) -> bool:
    """Whether an image is here, or comes from a registry."""
    for command in (["image", "inspect", name], ["pull", "-q", name]):
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not subprocess.run(
                ["docker", *command], capture_output=True, timeout=180
            ).returncode:
                return True
    return False


@dataclass(frozen=True)
class Stack:
    env: dict[str, str]
    http_url: str
    nats_url: str
    services: tuple[str, ...]
    prometheus_url: str
    grafana_url: str
    """Empty where its image cannot be had: then it does not run."""

    def run(self, *arguments: str, timeout_s: float = 120) -> str:
        done = compose(*arguments, env=self.env, timeout_s=timeout_s)
        assert done.returncode == 0, f"docker compose {arguments}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def python(self, service: str, code: str) -> str:
        return self.run("exec", "-T", service, "python", "-c", code).strip()


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Passwords as deploy/make_env.sh makes them."""
    folder = tmp_path_factory.mktemp("deploy")
    for name in ("make_env.sh", ".env.example"):
        shutil.copy(DEPLOY / name, folder)
    subprocess.run(["sh", folder / "make_env.sh"], check=True, capture_output=True)
    return folder / "secrets"


@pytest.fixture(scope="module")
def stack(secrets: Path, request: pytest.FixtureRequest) -> Iterator[Stack]:
    ports = ("EPD_PORT", "EPD_NATS_PORT", "EPD_PROMETHEUS_PORT", "EPD_GRAFANA_PORT")
    env = {"EPD_SECRETS_DIR": str(secrets), **dict.fromkeys(ports, "0")}
    try:
        subprocess.run(["docker", "info"], capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("no Docker engine answers: see deploy/docker_engine.sh")
    wanted = sorted(SERVICES)
    if has_image(GRAFANA):
        wanted.append("grafana")
    else:
        capture = request.config.pluginmanager.get_plugin("capturemanager")
        assert capture is not None
        with capture.global_and_fixture_disabled():
            print("\nGRAFANA IS NOT RUN: its image cannot be had here. Jaeger is not run either.")
    try:
        up = ("up", "--detach", "--wait", "--wait-timeout", str(START_S), *wanted)
        for step in (("build",), up):
            done = compose(*step, env=env, timeout_s=BUILD_S)
            if done.returncode:
                logs = compose("logs", "--tail", "40", env=env).stdout
                pytest.fail(f"docker compose {step[0]}:\n{done.stdout}\n{done.stderr}\n{logs}")
        http = compose("port", "gateway", "8000", env=env).stdout.strip()
        bus = compose("port", "nats", "4222", env=env).stdout.strip()
        password = (secrets / "nats_client").read_text().strip()
        nats_url = f"nats://client:{password}@{bus}"
        prometheus = compose("port", "prometheus", "9090", env=env).stdout.strip()
        grafana = ""
        if "grafana" in wanted:
            grafana = "http://" + compose("port", "grafana", "3000", env=env).stdout.strip()
        yield Stack(env, f"http://{http}", nats_url, tuple(wanted), f"http://{prometheus}", grafana)
    finally:
        compose("--profile", "epd", "down", "--volumes", "--remove-orphans", env=env)


def question(seed: int, images: int) -> tuple[list[bytes], shapes.Question]:
    """Pictures as PNG bytes, and a question about one of them whose answer is known."""
    rng = random.Random(seed)
    scenes = [shapes.random_scene(rng) for _ in range(images)]
    pngs = []
    for scene in scenes:
        buffer = io.BytesIO()
        shapes.draw(scene, 112, 112, rng).save(buffer, "PNG")
        pngs.append(buffer.getvalue())
    return pngs, shapes.ask(rng, scenes, "what")


def ask_over_http(stack: Stack, seed: int, images: int = 2) -> dict[str, Any]:
    """Ask, check the answer, and give the trail that the gateway has of it."""
    pngs, asked = question(seed, images)
    parts: list[dict[str, Any]] = [
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(png).decode()},
        }
        for png in pngs
    ]
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": asked.text}]}],
        "max_tokens": 16,
        "temperature": 0,
    }
    answer = httpx.post(f"{stack.http_url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == asked.answer
    request_id = answer.headers["x-request-id"]
    return dict(httpx.get(f"{stack.http_url}/ui/api/requests/{request_id}", timeout=10).json())


def ask_many(stack: Stack, seeds: range) -> list[dict[str, Any]]:
    """As many requests with six new pictures each at once."""
    with ThreadPoolExecutor(len(seeds)) as threads:
        return list(threads.map(lambda seed: ask_over_http(stack, seed, images=6), seeds))


def test_without_passwords_it_says_what_to_do() -> None:
    done = compose("config", "--quiet", env={"EPD_SECRETS_DIR": ""})
    assert done.returncode != 0
    assert "EPD_SECRETS_DIR" in done.stderr
    assert "run deploy/make_env.sh" in done.stderr


def test_workers_on_gpus_come_with_their_profile_alone() -> None:
    plain, on_gpus = (
        json.loads(compose(*profile, "config", "--format", "json", env=example()).stdout)
        for profile in ((), ("--profile", "gpu"))
    )
    assert set(on_gpus["services"]) - set(plain["services"]) == {"encoder-gpu", "pd-gpu"}
    for name in ("encoder-gpu", "pd-gpu"):
        service = on_gpus["services"][name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["device_ids"]) == ("nvidia", ["0"])
        assert service["environment"]["EPD_ENGINE_ARGS"].startswith("--gpu-memory-utilization")
        assert service["restart"] == "on-failure:5"


def test_prefill_and_decode_come_with_their_profile_alone() -> None:
    plain, apart = (
        json.loads(compose(*profile, "config", "--format", "json", env=example()).stdout)
        for profile in ((), ("--profile", "epd"))
    )
    assert set(apart["services"]) - set(plain["services"]) == {"prefill", "decode"}
    for role in ("prefill", "decode"):
        service = apart["services"][role]
        assert service["environment"]["EPD_PD_ROLE"] == role
        assert service["environment"]["EPD_SPLIT_TOKENS"] == "512"
        assert "EPD_KV_HOST=$$HOSTNAME" in service["command"][-1]
        assert service["read_only"] and service["cap_drop"] == ["ALL"]


def test_the_example_settings_are_complete_and_open_nothing_to_the_network() -> None:
    done = compose("config", "--format", "json", env=example())
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)
    services = config["services"]
    assert set(services) == SERVICES | {"nats-volume", "grafana"}
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["init"], name
        for port in service.get("ports", ()):
            assert port.get("host_ip") == "127.0.0.1", name
    open_ones = {name for name in services if services[name].get("ports")}
    assert open_ones == {"gateway", "nats", "prometheus", "grafana"}
    assert config["networks"]["inside"]["internal"]
    for name in ("encoder", "pd", "valkey"):
        assert set(services[name]["networks"]) == {"inside"}, name
    assert set(services["grafana"]["networks"]) == {"outside"}
    assert (services["grafana"]["image"], services["grafana"]["user"]) == (GRAFANA, "472:0")


def test_jaeger_comes_with_its_profile_alone() -> None:
    done = compose("--profile", "tracing", "config", "--format", "json", env=example())
    assert done.returncode == 0, done.stderr
    jaeger = json.loads(done.stdout)["services"]["jaeger"]
    assert jaeger["image"] == JAEGER
    assert jaeger["read_only"] and jaeger["user"] == "10001:10001"
    assert [port["host_ip"] for port in jaeger["ports"]] == ["127.0.0.1"]


def test_a_multimodal_request_over_http(stack: Stack) -> None:
    assert httpx.get(f"{stack.http_url}/ready", timeout=10).status_code == 200
    ask_over_http(stack, seed=1)


async def test_a_multimodal_request_over_nats(stack: Stack) -> None:
    """A job from this machine with nothing but a NATS client and MessagePack."""
    pngs, asked = question(2, 2)
    parts = [{"type": "media_ref", "item": place} for place in range(len(pngs))]
    content = [*parts, {"type": "text", "text": asked.text}]
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 16,
        "temperature": 0,
    }
    client = await nats.connect(stack.nats_url, allow_reconnect=False, inbox_prefix="_INBOX.client")
    try:
        inbox = client.new_inbox()
        frames = await client.subscribe(inbox)
        job = {
            "t": "generate",
            "v": 1,
            "request_id": uuid.uuid4().hex,
            "model": MODEL,
            "body": json.dumps(body).encode(),
            "items": [
                {"modality": "image", "media": {"inline": png, "content_type": "image/png"}}
                for png in pngs
            ],
            "inbox": inbox,
            "deadline": time.time() + 60,
        }
        subject = f"epd.v1.generate.{MODEL}.l0.any"
        await client.jetstream().publish(subject, msgpack.packb(job))
        data = b""
        while True:
            frame = msgpack.unpackb((await frames.next_msg(timeout=60)).data)
            assert frame["t"] != "error", frame
            data += frame.get("data", b"")
            if frame["t"] == "end":
                break
    finally:
        await client.close()
    assert json.loads(data)["choices"][0]["message"]["content"] == asked.answer


def test_nobody_is_root_and_no_root_filesystem_can_be_written(stack: Stack) -> None:
    for service in sorted(SERVICES):
        assert stack.run("exec", "-T", service, "id", "-u").strip() != "0", service
        mounts = stack.run("exec", "-T", service, "cat", "/proc/mounts").splitlines()
        root = next(fields for line in mounts if (fields := line.split())[1] == "/")
        assert "ro" in root[3].split(","), service


def test_every_panel_shows_something(stack: Stack) -> None:
    """By each panel's queries: on the Prometheus that scrapes these containers, and through Grafana if it
    runs."""
    panels = [panel for _, shown in DASHBOARDS.values() for panel in shown]
    queries = {
        query for panel in panels if panel.where in ("all", "vllm") for query, _ in panel.queries
    }
    targets = {"gateway": 8000, "encoder": 9464, "pd": 9464}
    give_up = time.monotonic() + 90
    with httpx.Client(base_url=stack.prometheus_url, timeout=10) as client:
        empty, seeds = queries, itertools.count(100)
        while empty := {query for query in empty if not answers(client, query)}:
            assert time.monotonic() < give_up, "\n".join(sorted(empty))
            ask_over_http(stack, next(seeds))
        found = client.get("/api/v1/targets", params={"state": "active"}).json()["data"]
        assert {
            target["labels"]["job"]: int(target["labels"]["instance"].rpartition(":")[2])
            for target in found["activeTargets"]
        } == targets
        assert {target["health"] for target in found["activeTargets"]} == {"up"}
        assert not client.get("/api/v1/alerts").json()["data"]["alerts"]
    if stack.grafana_url:
        with httpx.Client(base_url=stack.grafana_url, timeout=10) as client:
            shown = {entry["uid"] for entry in client.get("/api/search?type=dash-db").json()}
            assert shown == {f"epdflow-{name}" for name in DASHBOARDS}
            proxied = httpx.URL(stack.grafana_url).join("/api/datasources/proxy/uid/prometheus/")
            with httpx.Client(base_url=proxied, timeout=10) as through:
                assert answers(through, "sum(epd_gateway_open_requests)")


def test_the_gateway_has_no_torch(stack: Stack) -> None:
    code = "from importlib.util import find_spec as f; print(f('torch'), f('vllm'), f('fastapi'))"
    assert stack.python("gateway", code).startswith("None None ModuleSpec")


def test_encoder_and_pd_share_one_arena_with_hard_links(stack: Stack) -> None:
    stack.python("encoder", "open('/arena/compose-test', 'w').write('from the encoder')")
    linked = stack.python(
        "pd",
        "import os; os.link('/arena/compose-test', '/arena/compose-pin'); "
        "os.unlink('/arena/compose-test'); print(open('/arena/compose-pin').read())",
    )
    assert linked == "from the encoder"
    stack.python("encoder", "import os; os.unlink('/arena/compose-pin')")


def fails(stack: Stack, service: str, *command: str, **changed: str) -> str:
    """What a service that cannot start says, in a container of its own beside the others."""
    options = [word for name, value in changed.items() for word in ("-e", f"{name}={value}")]
    done = compose("run", "--rm", "--no-deps", "-T", *options, service, *command, env=stack.env)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = [
        each for each in (done.stdout + done.stderr).splitlines() if "service stopped:" in each
    ]
    assert "epd doctor" in line
    return line


def test_a_service_that_cannot_start_says_why(stack: Stack) -> None:
    wrong = {"EPD_REDIS_PASSWORD_FILE": "/run/secrets/nats_gateway"}
    assert "refuses the login" in fails(stack, "gateway", **wrong)
    away = {"EPD_NATS_URL": "nats://gateway@nats:4223", "EPD_BROKER_WAIT_S": "3"}
    assert "cannot connect to NATS at nats:4223" in fails(stack, "gateway", **away)
    assert "there is no model in" in fails(stack, "encoder", "epd-encoder", EPD_MODEL="/nothing")
    small = {"EPD_ARENA_DIR": "/dev/shm/arena", "EPD_ARENA_BYTES": str(8 << 30)}
    assert "has 512 MiB, and EPD_ARENA_BYTES" in fails(stack, "pd", "epd-pd", **small)


def test_the_doctor_runs_where_the_services_do(stack: Stack) -> None:
    for service in ("gateway", "encoder", "pd"):
        told = json.loads(stack.run("exec", "-T", service, "epd", "doctor", "--json"))
        assert told["ok"], (service, told)
        names = {each["name"] for each in told["findings"]}
        assert {"NATS", "Valkey", "maxmemory"} <= names
        assert ("model" in names) == (service != "gateway")


def test_what_cannot_start_is_seen_as_exited(stack: Stack, tmp_path: Path) -> None:
    """One that is started again and again, up to its limit, with the reason each time."""
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(
        "services:\n"
        "  never:\n"
        "    extends: {file: %s, service: gateway}\n"
        "    environment: {EPD_NATS_PASSWORD_FILE: /run/secrets/redis_gateway}\n"
        % (DEPLOY / "docker-compose.yml")
    )
    run = ["-f", str(wrong), "up", "--detach", "--no-deps", "never"]
    assert compose(*run, env=stack.env).returncode == 0
    states: list[str] = []
    give_up = time.monotonic() + 120
    while "exited" not in states:
        assert time.monotonic() < give_up, states
        time.sleep(1)
        told = compose("-f", str(wrong), "ps", "-a", "--format", "json", "never", env=stack.env)
        states = [json.loads(each)["State"] for each in told.stdout.splitlines()]
    logs = compose("-f", str(wrong), "logs", "--no-log-prefix", "never", env=stack.env).stdout
    assert logs.count("service stopped: cannot connect to NATS at nats:4222") == 6
    assert compose("-f", str(wrong), "rm", "--force", "never", env=stack.env).returncode == 0


def test_it_answers_again_after_a_broker_restart(stack: Stack) -> None:
    stack.run("restart", "nats")
    up = ("up", "--detach", "--wait", "--wait-timeout", "120")
    stack.run(*up, *stack.services, timeout_s=150)
    give_up = time.monotonic() + 60
    while httpx.get(f"{stack.http_url}/ready", timeout=10).status_code != 200:
        assert time.monotonic() < give_up, "not ready 60 s after NATS came back"
        time.sleep(0.5)
    ask_over_http(stack, seed=3)


def test_scaled_services_share_the_work_within_5_s(stack: Stack) -> None:
    up = ("up", "--detach", "--wait", "--wait-timeout", str(START_S), "--no-recreate")
    stack.run(*up, "--scale", "encoder=3", "--scale", "pd=2", *stack.services, timeout_s=START_S)
    started = time.monotonic()
    trails = ask_many(stack, range(1000, 1012))
    assert time.monotonic() - started < 5
    assert len({item["encoder"] for trail in trails for item in trail["items"]}) == 3
    assert len({trail["pd"]["worker"] for trail in trails}) == 2


@pytest.mark.parametrize(("service", "seed"), [("encoder", 2000), ("pd", 3000)])
def test_answers_come_although_a_worker_is_killed(stack: Stack, service: str, seed: int) -> None:
    """It is frozen first, so that it has jobs, or is waited for, when it dies."""
    victim = stack.run("ps", "--quiet", service).split()[0]
    subprocess.run(["docker", "pause", victim], check=True, capture_output=True)
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask_many, stack, range(seed, seed + 6))
        time.sleep(0.5)  # what the frozen one is given, it has by then
        subprocess.run(["docker", "kill", victim], check=True, capture_output=True)
        trails = asking.result()
    workers = {trail["pd"]["worker"] for trail in trails}
    if service == "encoder":
        workers = {item["encoder"] for trail in trails for item in trail["items"]}
    assert workers and victim[:12] not in workers, "a container's id is its worker's"


def test_prefill_and_decode_apart(stack: Stack) -> None:
    """In the place of all PD workers. A container's id is its worker's, and its name for the others."""
    apart = dataclasses.replace(stack, env=stack.env | {"EPD_SPLIT_TOKENS": "0"})
    up = ("--profile", "epd", "up", "--detach", "--wait", "--wait-timeout", str(START_S))
    services = (*stack.services, "prefill", "decode")
    apart.run(*up, "--scale", "encoder=1", "--scale", "pd=0", *services, timeout_s=START_S + 60)
    prefill, decode = (
        apart.run("--profile", "epd", "ps", "--quiet", role).strip()[:12]
        for role in ("prefill", "decode")
    )
    for trail in ask_many(apart, range(4000, 4004)):
        assert (trail["prefill"]["worker"], trail["pd"]["worker"]) == (prefill, decode)
        assert trail["pd"]["loaded_tokens"] > 0  # its keys and values came from the other


def test_down_leaves_nothing(stack: Stack) -> None:
    started = time.monotonic()
    stack.run("--profile", "epd", "down", "--volumes", timeout_s=180)
    assert time.monotonic() - started < 60
    label = f"label=com.docker.compose.project={PROJECT}"
    for kind in (["ps", "-a"], ["volume", "ls"], ["network", "ls"]):
        left = subprocess.run(
            ["docker", *kind, "-q", "--filter", label], capture_output=True, text=True, check=True
        )
        assert left.stdout == "", kind
