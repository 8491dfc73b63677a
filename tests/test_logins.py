"""Signing in to the brokers: TLS, NKeys, credentials files; and what is refused before a secret is sent."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nkeys
import pytest

from certificates import certificate
from epd_cli.brokers import Brokers, NatsBroker, embedded_brokers
from epd_common.bus import Bus
from epd_common.errors import UnavailableError
from epd_common.login import NatsLogin
from epd_common.settings import CommonSettings, SettingsError, load_settings
from epd_common.store import open_redis
from fake_engine import answer_text
from service_stack import bare_stack, picture, text_of

pytestmark = pytest.mark.slow  # many brokers or processes of its own

AT_ONCE_S = 5.0


@pytest.fixture
async def secured(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Brokers]:
    """Brokers whose NATS has this besides its users and JetStream, or in their place."""
    replaced, text = request.param(tmp_path)

    class Secured(NatsBroker):
        def _config(self) -> str:
            whole = super()._config()
            if replaced:
                whole = whole[: whole.index("authorization {")]
            return whole + text

    monkeypatch.setattr("epd_cli.brokers.NatsBroker", Secured)
    async with embedded_brokers(tmp_path / "secured") as running:
        yield running


def by_name(url: str, scheme: str) -> str:
    return url.replace("nats://", scheme + "://").replace("127.0.0.1", "localhost")


async def refused(url: str, login: NatsLogin, reason: str) -> None:
    started = time.monotonic()
    with pytest.raises(UnavailableError, match=reason) as caught:
        async with Bus(url, name="test", login=login):
            pass
    assert time.monotonic() - started < AT_ONCE_S
    assert "nats_unavailable" == caught.value.code


# -- TLS --------------------------------------------------------------------------------------------


def with_tls(folder: Path) -> tuple[bool, str]:
    certificate(folder, "localhost")
    pem = folder / "server.pem"
    return False, f'tls {{ cert_file: "{pem}", key_file: "{pem}", timeout: 5 }}\n'


@contextlib.asynccontextmanager
async def valkey_with_tls(brokers: Brokers, folder: Path) -> AsyncIterator[str]:
    """The Valkey of the wheel is built without TLS; this ends it in front of its socket. Yields a URL."""
    serves, _ = certificate(folder, "localhost")
    tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_unix_connection(brokers.redis.url.rpartition("@")[2])
        tasks.add(asyncio.ensure_future(pump(reader, inner[1])))
        tasks.add(asyncio.ensure_future(pump(inner[0], writer)))

    server = await asyncio.start_server(serve, "localhost", 0, ssl=serves)
    port = server.sockets[0].getsockname()[1]
    password = brokers.redis.url.partition("@")[0].rpartition(":")[2]
    try:
        yield f"rediss://:{password}@localhost:{port}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("secured", [with_tls], indirect=True)
async def test_services_over_tls(secured: Brokers, tmp_path: Path) -> None:
    nats_url, nats_ca = by_name(secured.nats_url, "tls"), tmp_path / "ca.pem"
    (tmp_path / "valkey").mkdir()
    async with valkey_with_tls(secured, tmp_path / "valkey") as redis_url:
        tls = {
            "nats_url": nats_url,
            "nats_ca": nats_ca,
            "redis_url": redis_url,
            "redis_ca": tmp_path / "valkey" / "ca.pem",
        }
        plain = secured.redis_url
        login = NatsLogin(ca=nats_ca)
        async with bare_stack(nats_url, plain, tmp_path, login=login, settings=tls) as stack:
            await stack.add_encoder()
            await stack.add_pd()
            await stack.add_gateway()
            await stack.ready()
            data = picture()
            assert text_of(await stack.ask("over TLS", data)) == answer_text("over TLS", data)


@pytest.mark.parametrize("secured", [with_tls], indirect=True)
async def test_a_nats_that_nobody_vouches_for_is_refused(secured: Brokers, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    certificate(tmp_path / "other", "localhost")
    url = by_name(secured.nats_url, "nats")  # the server asks for TLS, whatever the URL says
    await refused(url, NatsLogin(), "CERTIFICATE_VERIFY_FAILED")
    await refused(url, NatsLogin(ca=tmp_path / "other" / "ca.pem"), "CERTIFICATE_VERIFY_FAILED")
    await refused(secured.nats_url, NatsLogin(ca=tmp_path / "ca.pem"), "CERTIFICATE_VERIFY_FAILED")


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_nothing_is_sent_in_clear_where_tls_was_asked_for(
    tmp_path: Path, scheme: str
) -> None:
    """A server, or somebody between, that says it speaks no TLS gets no password."""
    certificate(tmp_path, "localhost")
    received = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        info = {
            "server_id": "x",
            "version": "2.10.0",
            "max_payload": 1 << 20,
            "auth_required": True,
        }
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        received += await reader.read(1 << 16)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    ca = None if scheme == "tls" else tmp_path / "ca.pem"
    try:
        url = f"{scheme}://user:secret@127.0.0.1:{port}"
        await refused(url, NatsLogin(ca=ca), "secure connection not available")
    finally:
        server.close()
        await server.wait_closed()
    assert received == b""


async def test_a_valkey_that_nobody_vouches_for_is_refused(
    brokers: Brokers, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    certificate(tmp_path / "other", "localhost")
    async with valkey_with_tls(brokers, tmp_path) as url:
        async with open_redis(url, ca=tmp_path / "ca.pem") as redis:
            assert await redis.ping()
        for ca in (None, tmp_path / "other" / "ca.pem"):
            with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
                async with open_redis(url, ca=ca):
                    pass
        wrong_name = url.replace("localhost", "127.0.0.1")
        with pytest.raises(UnavailableError):
            async with open_redis(wrong_name, ca=tmp_path / "ca.pem"):
                pass


# -- NKeys and credentials files --------------------------------------------------------------------


def new_pair(prefix: int) -> tuple[Any, bytes]:
    seed = nkeys.encode_seed(os.urandom(32), prefix)
    return nkeys.from_seed(bytearray(seed)), bytes(seed)


def with_nkey(folder: Path) -> tuple[bool, str]:
    for name in ("seed", "stranger"):
        pair, seed = new_pair(nkeys.PREFIX_BYTE_USER)
        (folder / name).write_bytes(seed + b"\n")
        (folder / f"{name}.pub").write_bytes(pair.public_key)
    public = (folder / "seed.pub").read_text()
    return True, f"authorization {{ users: [ {{ nkey: {public} }} ] }}\n"


def token(claims: dict[str, Any], issuer: Any) -> str:
    """A NATS JWT, version 2."""

    def packed(part: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()

    claims |= {"iat": int(time.time()), "iss": issuer.public_key.decode(), "name": "test"}
    claims["jti"] = base64.b32encode(hashlib.sha256(json.dumps(claims).encode()).digest()).decode()
    signed = f"{packed({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{packed(claims)}"
    signature = base64.urlsafe_b64encode(issuer.sign(signed.encode())).rstrip(b"=").decode()
    return f"{signed}.{signature}"


def with_jwt(folder: Path) -> tuple[bool, str]:
    """An operator, one account, and a credentials file of one of its users."""
    operator, _ = new_pair(nkeys.PREFIX_BYTE_OPERATOR)
    account, _ = new_pair(nkeys.PREFIX_BYTE_ACCOUNT)
    user, seed = new_pair(nkeys.PREFIX_BYTE_USER)
    names = {pair: pair.public_key.decode() for pair in (operator, account, user)}
    unlimited = {"subs": -1, "data": -1, "payload": -1}
    limits = {**unlimited, "conn": -1, "leaf": -1, "imports": -1, "exports": -1, "wildcards": True}
    of_operator = token(
        {"sub": names[operator], "nats": {"type": "operator", "version": 2}}, operator
    )
    of_account = token(
        {"sub": names[account], "nats": {"type": "account", "version": 2, "limits": limits}},
        operator,
    )
    of_user = token(
        {"sub": names[user], "nats": {"type": "user", "version": 2, **unlimited}}, account
    )
    (folder / "user.creds").write_text(
        f"-----BEGIN NATS USER JWT-----\n{of_user}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed.decode()}\n------END USER NKEY SEED------\n"
    )
    return True, (
        f"operator: {of_operator}\nresolver: MEMORY\n"
        f"resolver_preload {{ {names[account]}: {of_account} }}\n"
    )


def without_login(url: str) -> str:
    return "nats://" + url.rpartition("@")[2]


@pytest.mark.parametrize("secured", [with_nkey], indirect=True)
async def test_an_nkey_signs_in(secured: Brokers, tmp_path: Path) -> None:
    url = without_login(secured.nats_url)
    async with Bus(url, name="test", login=NatsLogin(nkey_seed_file=tmp_path / "seed")) as bus:
        await bus.flush()
    stranger = NatsLogin(nkey_seed_file=tmp_path / "stranger")
    await refused(url, stranger, "Authorization Violation")
    await refused(url, NatsLogin(), "Authorization Violation")


@pytest.mark.parametrize("secured", [with_jwt], indirect=True)
async def test_a_credentials_file_signs_in(secured: Brokers, tmp_path: Path) -> None:
    url = without_login(secured.nats_url)
    async with Bus(url, name="test", login=NatsLogin(creds=tmp_path / "user.creds")) as bus:
        await bus.flush()
    await refused(url, NatsLogin(), "Authorization Violation")


# -- settings ---------------------------------------------------------------------------------------


def test_files_that_cannot_be_used_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_nkey(tmp_path)
    certificate(tmp_path, "localhost")
    (tmp_path / "junk").write_text("junk-secret\n")
    _, seed = new_pair(nkeys.PREFIX_BYTE_ACCOUNT)
    (tmp_path / "account").write_bytes(seed)
    good_seed, junk, ca = tmp_path / "seed", tmp_path / "junk", tmp_path / "ca.pem"
    for given, reason in (
        ({"NATS_NKEY_SEED_FILE": junk}, "EPD_NATS_NKEY_SEED_FILE: the file holds no NKey seed"),
        ({"NATS_NKEY_SEED_FILE": tmp_path / "account"}, "holds no NKey seed of a user"),
        ({"NATS_CREDS": junk}, "EPD_NATS_CREDS: the file holds no user JWT"),
        ({"NATS_CREDS": tmp_path / "nowhere"}, "EPD_NATS_CREDS=.*nowhere"),
        ({"NATS_CREDS": junk, "NATS_NKEY_SEED_FILE": good_seed}, "set one of"),
        ({"NATS_CA": junk}, "EPD_NATS_CA: no certificates in"),
        ({"REDIS_CA": junk, "REDIS_URL": "rediss://x"}, "EPD_REDIS_CA: no certificates in"),
        ({"REDIS_CA": ca, "REDIS_URL": "redis://:secret@x"}, "must begin with rediss://"),
    ):
        with monkeypatch.context() as patched:
            for name, value in given.items():
                patched.setenv(f"EPD_{name}", str(value))
            with pytest.raises(SettingsError, match=reason) as caught:
                load_settings(CommonSettings)
        assert "secret" not in str(caught.value)
        assert seed.decode() not in str(caught.value)


def test_files_that_are_right_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_nkey(tmp_path)
    certificate(tmp_path, "localhost")
    monkeypatch.setenv("EPD_NATS_NKEY_SEED_FILE", str(tmp_path / "seed"))
    monkeypatch.setenv("EPD_NATS_CA", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("EPD_NATS_CREDS", "")
    expected = NatsLogin(nkey_seed_file=tmp_path / "seed", ca=tmp_path / "ca.pem")
    assert load_settings(CommonSettings).nats_login() == expected


def test_what_is_missing_for_nkeys_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_nkey(tmp_path)
    monkeypatch.setattr("epd_common.login.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="extra `nkeys`"):
        NatsLogin(nkey_seed_file=tmp_path / "seed").check()
