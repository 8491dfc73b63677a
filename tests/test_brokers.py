"""The embedded brokers: they answer, come back with their data, and never outlive their parent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client as NatsClient
from nats.js.api import StreamConfig
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError

from epd_cli.brokers import BrokerError, Brokers, embedded_brokers

BOUND_S = 20.0

PARENT = """
import asyncio, sys
from pathlib import Path
from epd_cli.brokers import embedded_brokers

async def main():
    async with embedded_brokers(Path(sys.argv[1])) as brokers:
        print(*brokers.pids.values(), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def nats_client(url: str) -> AsyncIterator[NatsClient]:
    client = await nats.connect(url, allow_reconnect=False, connect_timeout=5)
    try:
        yield client
    finally:
        await client.close()


async def nats_greeting(url: str, password: str | None) -> bytes:
    """Return the server's answer to CONNECT and PING.

    Bytes by hand: the client library tries again for seconds and leaks its socket when refused.
    """
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        await reader.readline()  # INFO
        login = {"verbose": False} | ({} if password is None else {"user": "epd", "pass": password})
        writer.write(b"CONNECT " + json.dumps(login).encode() + b"\r\nPING\r\n")
        return await asyncio.wait_for(reader.readline(), BOUND_S)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ended(pid: int) -> None:
    """Wait, for a bounded time, until the process is gone."""
    pidfd = os.pidfd_open(pid)
    try:
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(pidfd, gone.set)
        try:
            await asyncio.wait_for(gone.wait(), BOUND_S)
        finally:
            loop.remove_reader(pidfd)
    finally:
        os.close(pidfd)


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


async def test_nats_answers_with_its_standard_payload_limit(nats_url: str) -> None:
    async with nats_client(nats_url) as client:
        inbox = await client.subscribe("brokers-test.echo")
        await client.publish("brokers-test.echo", b"hello")
        assert (await inbox.next_msg(timeout=5)).data == b"hello"
        assert client.max_payload == 1 << 20


async def test_valkey_answers_over_its_socket(redis_url: str) -> None:
    assert redis_url.startswith("unix://")
    async with Redis.from_url(redis_url) as redis:
        await redis.set("brokers-test", b"\x00\xff" * 50_000)
        assert await redis.get("brokers-test") == b"\x00\xff" * 50_000
        assert await redis.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        await redis.delete("brokers-test")


async def test_a_wrong_password_is_refused(brokers: Brokers) -> None:
    assert b"Authorization Violation" in await nats_greeting(brokers.nats_url, "wrong")
    assert b"Authorization Violation" in await nats_greeting(brokers.nats_url, None)
    assert b"PONG" in await nats_greeting(brokers.nats_url, _password(brokers.nats_url))
    once = Retry(NoBackoff(), 0)
    wrong = brokers.redis_url.replace(_password(brokers.redis_url), "wrong")
    async with Redis.from_url(wrong, retry=once) as redis:
        with pytest.raises(RedisError, match="invalid username-password pair"):
            await redis.ping()
    no_password = brokers.redis_url.rpartition("@")[2]
    async with Redis(unix_socket_path=no_password, protocol=2, retry=once) as redis:
        with pytest.raises(RedisError, match="Authentication required"):
            await redis.ping()


def test_passwords_and_sockets_are_for_this_user_only(brokers: Brokers) -> None:
    for folder in (brokers.nats.folder, brokers.redis.folder):
        assert folder.stat().st_mode & 0o077 == 0
        assert (folder / "server.conf").stat().st_mode & 0o077 == 0
    for broker in (brokers.nats, brokers.redis):
        command = Path(f"/proc/{broker.pid}/cmdline").read_text()
        assert _password(broker.url) not in command


async def test_a_restart_keeps_address_and_jetstream_data(tmp_path: Path) -> None:
    async with embedded_brokers(tmp_path) as brokers:
        urls = brokers.nats_url, brokers.redis_url
        pids = brokers.pids
        async with nats_client(brokers.nats_url) as client:
            js = client.jetstream()
            await js.add_stream(StreamConfig(name="KEPT", subjects=["kept.>"]))
            await js.publish("kept.one", b"still here")
        await brokers.nats.restart()
        await brokers.redis.kill()
        assert not brokers.redis.running
        await brokers.redis.start()

        assert (brokers.nats_url, brokers.redis_url) == urls
        assert not set(brokers.pids.values()) & set(pids.values())
        async with nats_client(brokers.nats_url) as client:
            message = await client.jetstream().get_last_msg("KEPT", "kept.one")
            assert message.data == b"still here"
        async with Redis.from_url(brokers.redis_url) as redis:
            assert await redis.ping()


async def test_data_is_taken_up_again_by_the_next_run(tmp_path: Path) -> None:
    async with (
        embedded_brokers(tmp_path, redis=False) as first,
        nats_client(first.nats_url) as client,
    ):
        await client.jetstream().add_stream(StreamConfig(name="KEPT", subjects=["kept.>"]))
        first_url = first.nats_url
    async with (
        embedded_brokers(tmp_path, redis=False) as second,
        nats_client(second.nats_url) as client,
    ):
        assert (await client.jetstream().stream_info("KEPT")).config.subjects == ["kept.>"]
        assert _password(second.nats_url) != _password(first_url)


async def test_a_full_valkey_says_so_and_evicts_nothing(tmp_path: Path) -> None:
    async with (
        embedded_brokers(tmp_path, nats=False, redis_maxmemory_bytes=8 << 20) as brokers,
        Redis.from_url(brokers.redis_url) as redis,
    ):
        await redis.set("first", b"kept")
        with pytest.raises(OutOfMemoryError):
            for number in range(32):
                await redis.set(f"filler-{number}", b"x" * (1 << 20))
        assert await redis.get("first") == b"kept"


async def test_valkey_listens_on_tcp_where_asked(tmp_path: Path) -> None:
    async with embedded_brokers(tmp_path, nats=False, redis_tcp=True) as brokers:
        before = brokers.redis.tcp_url
        await brokers.redis.restart()
        assert brokers.redis.tcp_url == before
        async with Redis.from_url(before) as redis:
            assert await redis.ping()


async def test_a_deep_state_folder_still_gets_a_short_socket_path(tmp_path: Path) -> None:
    deep = tmp_path / ("a" * 60) / 'with space, "quotes" and 100%'
    async with embedded_brokers(deep) as brokers, Redis.from_url(brokers.redis_url) as redis:
        assert await redis.ping()
        async with nats_client(brokers.nats_url) as client:
            await client.jetstream().add_stream(StreamConfig(name="S", subjects=["s"]))
        socket_path = Path(brokers.redis_url.rpartition("@")[2])
        assert len(os.fsencode(socket_path)) <= 100
    assert not socket_path.parent.exists()


async def test_both_end_with_the_context_even_when_frozen(tmp_path: Path) -> None:
    # The bound is below the time after which `stop` uses force: they end by themselves.
    async with asyncio.timeout(4), embedded_brokers(tmp_path) as brokers:
        pids = list(brokers.pids.values())
        os.kill(brokers.nats.pid, signal.SIGSTOP)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_both_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    line = await asyncio.wait_for(parent.stdout.readline(), BOUND_S)
    children = [int(pid) for pid in line.split()]
    assert len(children) == 2
    try:
        waits = [asyncio.ensure_future(ended(pid)) for pid in children]
        await asyncio.sleep(0)  # both are being watched before the parent goes
        parent.kill()
        await parent.wait()
        await asyncio.gather(*waits)
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # Nobody holds the folder any more, so that the next start finds it free.
    async with embedded_brokers(tmp_path, redis=False) as brokers:
        assert brokers.nats.running


async def test_a_folder_in_use_is_refused(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_cli.brokers._LOCK_TIMEOUT_S", 0.1)
    with pytest.raises(BrokerError, match="--state-dir"):
        async with embedded_brokers(brokers.state_dir):
            pass
    assert brokers.nats.running


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#!/bin/sh\necho no memory for you >&2\nexit 3\n", r"exit status 3[\s\S]*no memory for"),
        ("\x7fELF, but not really", r"cannot run .*Exec format error"),
        ("#!/bin/sh\nexec sleep 60\n", r"did not answer within 0\.5 s"),
    ],
    ids=["ends", "is-no-program", "hangs"],
)
async def test_a_broken_program_gives_a_clear_error(
    tmp_path: Path, text: str, expected: str
) -> None:
    broken = script(tmp_path / "broken-server", text)
    with pytest.raises(BrokerError, match=expected) as caught:
        async with embedded_brokers(tmp_path / "state", redis_binary=broken, start_timeout_s=0.5):
            pytest.fail("a broken Valkey was taken for a running one")
    assert str(broken) in str(caught.value)
    assert "install the extra `local`" in str(caught.value)


async def test_a_missing_program_gives_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.files", lambda _: None)
    with pytest.raises(BrokerError, match=r"nats-server was found neither .* extra `local`"):
        async with embedded_brokers(tmp_path / "state"):
            pass


async def test_what_was_not_started_cannot_be_read(tmp_path: Path) -> None:
    async with embedded_brokers(tmp_path, redis=False) as brokers:
        assert set(brokers.pids) == {"nats"}
        with pytest.raises(BrokerError, match="redis=True"):
            _ = brokers.redis_url


def _password(url: str) -> str:
    return url.partition("@")[0].rpartition(":")[2]
