"""API keys: entries as they are written, the edge that asks for them, and a file that changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError

from epd_cli.__main__ import main
from epd_common.api_keys import ApiKey, hash_key, new_key, parse_file, parse_list
from epd_common.settings import SettingsError, load_settings
from epd_gateway import auth
from epd_gateway.settings import GatewaySettings
from service_stack import CHAT, ServiceStack, bare_stack, eventually, text_of

HASH = hash_key(b"one")
OTHER = hash_key(b"two")


def entry(key: str, tenant: str, **fields: str) -> str:
    return ApiKey(hash=hash_key(key.encode()), tenant=tenant, **fields).line()  # type: ignore[arg-type]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# -- entries ----------------------------------------------------------------------------------------


def test_entries_are_read_as_they_are_written() -> None:
    keys = (
        ApiKey(hash=HASH, tenant="acme"),
        ApiKey(hash=OTHER, tenant="b.c_d-1", name="ci", weight=2.5, cache_scope="shared"),
        ApiKey(hash="3" * 64, tenant="vip", priority=-10),
    )
    lines = [key.line() for key in keys]
    assert parse_file("\n# those of today\n\n" + "\r\n".join(lines) + "\n") == keys
    assert parse_list(";".join(lines) + ";") == keys
    assert parse_list("") == ()
    assert parse_list(f"sha256:{HASH} tenant=t")[0].weight == 1.0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("epd-plain-secret tenant=t", "begin with sha256:"),
        (f"sha256:{HASH.upper()} tenant=t", "begin with sha256:"),
        (f"sha256:{HASH[:-1]} tenant=t", "begin with sha256:"),
        (f"{HASH} tenant=t", "begin with sha256:"),
        (f"sha256:{HASH}", "tenant="),
        (f"sha256:{HASH} tenant=", "tenant="),
        (f"sha256:{HASH} tenant=a:b", "tenant="),
        (f"sha256:{HASH} tenant={'a' * 65}", "tenant="),
        (f"sha256:{HASH} tenant=a tenant=b", "once each"),
        (f"sha256:{HASH} tenant=a secret", "once each"),
        (f"sha256:{HASH} tenant=a name=", "name="),
        (f"sha256:{HASH} tenant=a weight=0", "weight="),
        (f"sha256:{HASH} tenant=a weight=nan", "weight="),
        (f"sha256:{HASH} tenant=a weight=secret", "weight="),
        (f"sha256:{HASH} tenant=a cache_scope=secret", "cache_scope="),
        (f"sha256:{HASH} tenant=a priority=secret", "priority="),
        (f"sha256:{HASH} tenant=a priority=1.5", "priority="),
        (f"sha256:{HASH} tenant=a priority=-1000000", "priority="),
    ],
)
def test_entries_that_are_wrong(line: str, reason: str) -> None:
    good = f"sha256:{OTHER} tenant=t"
    with pytest.raises(ValueError, match=r"^line 3: ") as caught:
        parse_file(f"{good}\n\n{line}\n")
    assert reason in str(caught.value)
    assert "secret" not in str(caught.value), "what is written there may be a key"
    with pytest.raises(ValueError, match=r"^entry 2: "):
        parse_list(f"{good};{line}")


def test_a_key_has_one_entry() -> None:
    with pytest.raises(ValueError, match="line 2: this key has an entry already"):
        parse_file(f"sha256:{HASH} tenant=a\nsha256:{HASH} tenant=b")


def test_the_command_makes_a_key_and_its_line() -> None:
    command = [sys.executable, "-m", "epd_cli", "key", "new", "--tenant", "acme", "--name", "ci"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    _, key, _, line = done.stdout.splitlines()
    assert parse_file(line) == (ApiKey(hash=hash_key(key.encode()), tenant="acme", name="ci"),)
    assert len({key, new_key(), new_key()}) == 3
    wrong = subprocess.run([*command, "--weight", "-1"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "weight= must be a number above 0" in wrong.stderr
    assert not wrong.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tenant", "a b"), "argument --tenant: 'a b' is not 1 to 64 letters"),
        (("--tenant", ""), "argument --tenant: '' is not 1 to 64 letters"),
        (("--tenant", "a", "--name", "x;y"), "argument --name: 'x;y' is not 1 to 64 letters"),
    ],
)
def test_a_key_is_made_for_names_that_an_entry_can_hold(
    words: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["epd", "key", "new", *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert said in capsys.readouterr().err


# -- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no key"),
        (b"# nothing\n", "holds no key"),
        (b"\xff\xfe", "no text"),
        (b"\nepd-plain-secret tenant=a\n", "line 2: it must begin"),
    ],
)
def test_a_malformed_file_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, reason: str
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    monkeypatch.setenv("EPD_API_KEYS_FILE", str(path))
    with pytest.raises(SettingsError, match=reason) as caught:
        load_settings(GatewaySettings)
    assert f"EPD_API_KEYS_FILE='{path}'" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_malformed_entries_stop_the_start_and_are_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EPD_API_KEYS", "epd-plain-secret tenant=a")
    monkeypatch.setenv("EPD_CACHE_SCOPE", "nobody")
    with pytest.raises(SettingsError, match=r"EPD_API_KEYS: .*entry 1: it must begin") as caught:
        load_settings(GatewaySettings)
    assert "EPD_CACHE_SCOPE='nobody'" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_no_file_is_named_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_API_KEYS_FILE", "")
    monkeypatch.setenv("EPD_API_KEYS", "")
    settings = load_settings(GatewaySettings)
    assert (settings.api_keys, settings.api_keys_file) == ((), None)
    monkeypatch.setenv("EPD_API_KEYS_FILE", "/nowhere")
    with pytest.raises(SettingsError, match="EPD_API_KEYS_FILE='/nowhere'"):
        load_settings(GatewaySettings)


# -- the edge ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def keyed_stack(nats_url: str, redis_url: str, folder: Path) -> AsyncIterator[ServiceStack]:
    """A gateway with a file of one key, and one in its environment."""
    (folder / "keys").write_text(entry("in-file", "a") + "\n")
    async with bare_stack(nats_url, redis_url, folder) as running:
        await running.add_pd()
        await running.add_gateway(
            api_keys_file=folder / "keys", api_keys=entry("in-environment", "b")
        )
        running.http.headers.update(bearer("in-file"))
        await running.ready()
        yield running


@pytest.fixture(scope="module")
async def running(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServiceStack]:
    async with keyed_stack(nats_url, redis_url, tmp_path_factory.mktemp("keys")) as made:
        yield made


@pytest.fixture
def stack(running: ServiceStack) -> ServiceStack:
    """Whose client sends a right key, if the test does not take it away."""
    running.http.headers.update(bearer("in-file"))
    return running


def check_refused(response: httpx.Response) -> None:
    assert response.status_code == 401, response.text
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert error["param"] is None


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", "Bearer")],
        [("authorization", "in-file")],
        [("authorization", "Basic in-file")],
        [("authorization", "Bearer in-fil")],
        [("authorization", "Bearer in-file2")],
        [("authorization", "Bearer IN-FILE")],
        [("authorization", f"Bearer {hash_key(b'in-file')}")],
        [("authorization", "Bearer in-file"), ("authorization", "Bearer wrong")],
        [("x-api-key", "in-file")],
        [("authorization", b"Bearer \xff\xfe")],
    ],
)
async def test_no_key_and_wrong_ones(
    stack: ServiceStack, headers: list[tuple[str, str | bytes]]
) -> None:
    del stack.http.headers["authorization"]
    sent = httpx.Headers([(n, v.encode() if isinstance(v, str) else v) for n, v in _raw(headers)])
    check_refused(await stack.http.post(CHAT, headers=sent, json=stack.body("hello")))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("POST", "/v1/files"),
        ("GET", "/v1/files/file-1"),
        ("DELETE", "/v1/files/file-1"),
        ("GET", "/v1/models"),
        ("GET", "/v1/nothing"),
        ("GET", "/nothing"),
        ("GET", "//v1/models"),
        ("GET", "/health/"),
        ("GET", "/health/../v1/models"),
        ("OPTIONS", CHAT),
    ],
)
async def test_every_route_needs_a_key(stack: ServiceStack, method: str, path: str) -> None:
    del stack.http.headers["authorization"]
    check_refused(await stack.http.request(method, path))


def _raw(headers: list[tuple[str, str | bytes]]) -> list[tuple[bytes, str | bytes]]:
    return [(name.encode(), value) for name, value in headers]


@pytest.mark.parametrize("key", ["in-file", "in-environment"])
@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   "])
async def test_right_keys(stack: ServiceStack, key: str, scheme: str) -> None:
    stack.http.headers["authorization"] = scheme + key
    assert text_of(await stack.ask("hello")) == "hello"


async def test_the_official_client_signs_in(stack: ServiceStack) -> None:
    base = f"{stack.http.base_url}/v1"
    async with AsyncOpenAI(base_url=base, api_key="in-file", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] != []
    async with AsyncOpenAI(base_url=base, api_key="wrong", max_retries=0) as client:
        with pytest.raises(AuthenticationError, match="not known here"):
            await client.models.list()


async def test_what_monitoring_asks_stays_open(stack: ServiceStack) -> None:
    before = await refused_so_far(stack)
    check_refused(await stack.http.get("/v1/models", headers=bearer("wrong")))
    del stack.http.headers["authorization"]
    assert (await stack.http.get("/health")).status_code == 200
    assert (await stack.http.get("/ready")).status_code == 503  # there is no encoder
    assert await refused_so_far(stack) == before + 1


async def refused_so_far(stack: ServiceStack) -> float:
    (line,) = (
        line
        for line in (await stack.http.get("/metrics")).text.splitlines()
        if line.startswith("epd_gateway_refused_keys_total ")
    )
    return float(line.split()[1])


async def test_a_large_body_is_refused_unread(stack: ServiceStack) -> None:
    """Whoever has no key cannot make the gateway hold anything."""
    url = stack.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            "content-length: 60000000\r\n\r\n".encode()
        )
        line = await asyncio.wait_for(reader.readline(), 5)
        assert line.startswith(b"HTTP/1.1 401")
    finally:
        writer.close()


# -- a file that changes ----------------------------------------------------------------------------


@pytest.fixture
async def changing(
    nats_url: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ServiceStack]:
    """A stack whose file the test changes."""
    monkeypatch.setattr(auth, "LOOK_S", 0.01)
    async with keyed_stack(nats_url, redis_url, tmp_path) as made:
        yield made


async def status_of(stack: ServiceStack, key: str) -> int:
    return (await stack.http.get("/v1/models", headers=bearer(key))).status_code


async def eventually_status(stack: ServiceStack, key: str, status: int) -> None:
    async def is_so() -> bool:
        return await status_of(stack, key) == status

    await eventually(is_so, f"{key} is answered {status}")


@pytest.mark.parametrize("how", ["written", "replaced"])
async def test_keys_come_and_go_without_a_restart(
    changing: ServiceStack, tmp_path: Path, how: str
) -> None:
    assert await status_of(changing, "new") == 401
    text = entry("new", "c") + "\n"
    if how == "written":
        (tmp_path / "keys").write_text(text)
    else:
        (tmp_path / "other").write_text(text)
        os.replace(tmp_path / "other", tmp_path / "keys")
    await eventually_status(changing, "new", 200)
    assert await status_of(changing, "in-file") == 401, "it was taken out"
    assert await status_of(changing, "in-environment") == 200


@pytest.mark.parametrize("content", [f"sha256:{HASH} tenant=x\nplain-secret tenant=a\n", "", None])
async def test_a_malformed_file_keeps_the_old_keys(
    changing: ServiceStack,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    content: str | None,
) -> None:
    path = tmp_path / "keys"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)

    def errors() -> list[str]:
        return [
            record.getMessage()
            for record in caplog.records
            if record.levelno == logging.ERROR and record.name == "epd_gateway.auth"
        ]

    await eventually(lambda: bool(errors()), "the error is logged")
    assert str(path) in errors()[0]
    if content:
        assert "line 2: it must begin with sha256:" in errors()[0]
    assert "secret" not in caplog.text
    assert await status_of(changing, "in-file") == 200
    assert await status_of(changing, "one") == 401, "no part of such a file counts"
    await asyncio.sleep(0.1)
    assert len(errors()) == 1, "it is said once"
    path.write_text(entry("new", "c") + "\n")
    await eventually_status(changing, "new", 200)
