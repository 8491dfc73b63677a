"""The fetcher against real servers on loopback, and against names that lead where nobody may go.

Every fetcher here has its own resolver, and a network that notes each connection and connects to loopback
alone: a check that is missing shows as an attempt, and never leaves this machine.
"""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpcore
import pytest

from certificates import certificate
from epd_common.errors import (
    BadRequestError,
    BusyError,
    EpdError,
    TooLargeError,
    UnsupportedMediaError,
)
from epd_common.ingest import FetchedMedia, IngestLimits, PictureChecker
from epd_gateway.addresses import AllowedHost, is_public, parse_allowed_hosts
from epd_gateway.fetch import WAITING_EACH, MediaFetcher

PLACE = "messages[0].content[1]"
BYTES = bytes(range(256)) * 40
MAX_BYTES = 20_000
PUBLIC = "93.184.216.34"
PRIVATE = "10.1.2.3"


class Network(httpcore.AsyncNetworkBackend):
    """Notes where it is asked to connect to; public addresses lead to the server of the test."""

    def __init__(self, port: int) -> None:
        self._tcp = httpcore.AnyIOBackend()
        self._port = port
        self.attempts: list[str] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.attempts.append(f"{host}:{port}")
        if host not in (PUBLIC, "127.0.0.1"):
            raise httpcore.ConnectError("not in a test")
        return await self._tcp.connect_tcp("127.0.0.1", self._port, timeout)


class Names:
    """A resolver that knows few names, each with the answers it gives in turn."""

    def __init__(self) -> None:
        self._known = {
            "good.example": [[PUBLIC]],
            "other.example": [[PUBLIC]],
            "private.example": [[PRIVATE]],
            "mixed.example": [[PUBLIC, PRIVATE]],
            "two.example": [["93.184.216.99", PUBLIC]],
            "rebinding.example": [[PUBLIC], [PRIVATE]],
            "localhost": [["127.0.0.1"]],
        }
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        try:
            return [str(ipaddress.ip_address(host))]
        except ValueError:
            with suppress(OSError):  # other spellings of addresses, which systems' resolvers take
                return [socket.inet_ntoa(socket.inet_aton(host.rstrip(".")))]
            answers = self._known.get(host, [[]])
            return answers.pop(0) if len(answers) > 1 else answers[0]


def answer(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


class Server:
    """An HTTP server that answers from a table, and keeps the requests it got."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[str] = []
        self.arrived = asyncio.Event()
        self.hung_up = asyncio.Event()
        self.pages: dict[str, bytes] = {
            "/a.png": answer("200 OK", BYTES, "Content-Type: image/png"),
            "/cookie": answer("302 Found", b"", "Location: /a.png", "Set-Cookie: a=b"),
            "/missing": answer("404 Not Found", b"no"),
            "/error": answer("503 Service Unavailable"),
            "/gzip": answer("200 OK", b"xx", "Content-Encoding: gzip"),
            "/claims-much": b"HTTP/1.1 200 OK\r\nContent-Length: 20001\r\n\r\n",
            "/no-length": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + BYTES,
            "/sends-much": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + BYTES * 2,
            "/exact": answer("200 OK", b"x" * MAX_BYTES),
            "/breaks-off": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nxx",
            "/not-http": b"220 mail ready\r\n\r\n",
            "/loop": answer("302 Found", b"", "Location: /loop"),
            "/nowhere": answer("302 Found"),
            "/relative": answer("307 Temporary Redirect", b"", "Location: a.png"),
            "/3": answer("301 Moved", b"", "Location: /2"),
            "/2": answer("303 See Other", b"", "Location: /1"),
            "/1": answer("308 Permanent Redirect", b"", "Location: /a.png"),
            "/4": answer("302 Found", b"", "Location: /3"),
            "/to-loopback": answer("302 Found", b"", "Location: https://127.0.0.1/a.png"),
            "/to-metadata": answer("302 Found", b"", "Location: https://169.254.169.254/latest"),
            "/to-file": answer("302 Found", b"", "Location: file:///etc/passwd"),
            "/bomb": answer("200 OK", gzip.compress(bytes(10_000_000)), "Content-Encoding: gzip"),
            "/page": answer("200 OK", b"<p>no picture</p>", "Content-Type: text/html"),
        }
        self.endless: dict[str, tuple[bytes, bytes, float]] = {
            # What comes first, what then comes again and again, and the seconds between.
            "/endless-body": (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 4096, 0.0),
            "/endless-chunks": (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
                b"1000\r\n" + b"x" * 4096 + b"\r\n",
                0.0,
            ),
            "/endless-headers": (b"HTTP/1.1 200 OK\r\n", b"X: " + b"y" * 1000 + b"\r\n", 0.0),
            "/drips": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"x", 0.02),
            "/drips-headers": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", 0.02),
        }

    def redirect(self, path: str, location: str) -> None:
        self.pages[path] = answer("302 Found", b"", f"Location: {location}")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
        except (asyncio.IncompleteReadError, ConnectionError):
            return writer.close()
        self.requests.append(request)
        self.arrived.set()
        path = request.split()[1].partition("?")[0]
        page = self.pages.get(path)
        if path in self.endless:
            await self._go_on(writer, *self.endless[path])
        elif page is None:
            await reader.read()  # Hangs until the client goes away.
            self.hung_up.set()
        else:
            writer.write(page)
        writer.close()

    async def _go_on(
        self, writer: asyncio.StreamWriter, first: bytes, again: bytes, pause_s: float
    ) -> None:
        with suppress(ConnectionError):
            writer.write(first)
            while True:
                writer.write(again)
                await writer.drain()
                await asyncio.sleep(pause_s)
        self.hung_up.set()


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls) as running:
        server.port = running.sockets[0].getsockname()[1]
        yield server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as running:
        yield running


class Setup:
    """A fetcher and all that it is made of."""

    def __init__(self, server: Server, allow: str = "", **options: Any) -> None:
        self.network = Network(server.port)
        self.names = Names()
        self.fetcher = MediaFetcher(
            **{
                "allowed": parse_allowed_hosts(allow),
                "max_bytes": MAX_BYTES,
                "timeout_s": 10.0,
                "resolver": self.names,
                "network": self.network,
                **options,
            }
        )

    async def fails(self, url: str, code: str) -> EpdError:
        async with self.fetcher as fetcher:
            with pytest.raises(EpdError) as caught:
                await fetcher.fetch(url, PLACE)
        error = caught.value
        assert (error.code, error.param, error.stage) == (code, PLACE, "ingest")
        assert PLACE in error.message
        return error


# What works.


@pytest.mark.parametrize(
    ("path", "requests"),
    [("/a.png", 1), ("/no-length", 1), ("/relative", 2), ("/1", 2), ("/3", 4), ("/cookie", 2)],
)
async def test_an_allowed_host_is_fetched(server: Server, path: str, requests: int) -> None:
    setup = Setup(server, "localhost")
    async with setup.fetcher as fetcher:
        found = await fetcher.fetch(f"http://localhost:{server.port}{path}", PLACE)
    assert found.data == BYTES
    assert len(server.requests) == requests
    assert all("\ncookie:" not in request.lower() for request in server.requests)


async def test_what_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    setup = Setup(server, "good.example:8080")
    async with setup.fetcher as fetcher:
        found = await fetcher.fetch(" http://GOOD.example:8080/a.png?x=%20y#part\n", PLACE)
    assert found.content_type == "image/png"
    [request] = server.requests
    assert request.startswith("GET /a.png?x=%20y HTTP/1.1\r\n")
    assert "host: good.example:8080\r\n" in request.lower()
    assert "accept-encoding: identity\r\n" in request.lower()
    assert setup.network.attempts == [f"{PUBLIC}:8080"]


async def test_https_of_a_public_host_goes_to_the_checked_address_under_its_name(
    tmp_path: Path,
) -> None:
    serves, trusts = certificate(tmp_path, "good.example")
    names: list[str | None] = []
    serves.sni_callback = lambda _socket, name, _context: names.append(name)
    async with serving(serves) as server:
        setup = Setup(server, tls=trusts)
        async with setup.fetcher as fetcher:
            found = await fetcher.fetch("https://good.example/a.png", PLACE)
        assert found.data == BYTES
        assert names == ["good.example"]
        assert "host: good.example\r\n" in server.requests[0].lower()
        assert setup.network.attempts == [f"{PUBLIC}:443"]
        assert setup.names.asked == ["good.example"]


async def test_a_certificate_for_another_name_is_not_accepted(tmp_path: Path) -> None:
    serves, trusts = certificate(tmp_path, "good.example")
    async with serving(serves) as server:
        setup = Setup(server, tls=trusts)
        await setup.fails("https://other.example/a.png", "media_fetch_failed")
        assert server.requests == []


async def test_the_next_address_is_tried(server: Server) -> None:
    setup = Setup(server, "two.example")
    async with setup.fetcher as fetcher:
        await fetcher.fetch("http://two.example/a.png", PLACE)
    assert setup.network.attempts == ["93.184.216.99:80", f"{PUBLIC}:80"]


# What is refused.


@pytest.mark.parametrize(
    "url",
    [
        "http://good.example/a.png",
        "ftp://good.example/a.png",
        "file:///etc/passwd",
        "gopher://good.example/",
        "https://",
        "https:///a.png",
        "//good.example/a.png",
        "a.png",
        "https://user@good.example/",
        "https://user:secret@good.example/",
        "https://good.example:port/",
        "https://good.example:99999999/",
        "https://[::1/",
        "https://good.example/a\nb",
        "https://good.example/" + "a" * 8192,
    ],
)
async def test_urls_refused_before_a_name_is_resolved(server: Server, url: str) -> None:
    setup = Setup(server)
    error = await setup.fails(url, "media_url_refused")
    assert isinstance(error, BadRequestError)
    assert "secret" not in error.message
    assert (setup.names.asked, setup.network.attempts) == ([], [])


@pytest.mark.parametrize(
    "host",
    [
        "private.example",
        "mixed.example",
        "localhost",
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[fd00:ec2::254]",
        "[64:ff9b::a01:203]",
    ],
)
async def test_fc16_hosts_refused_without_a_connection(server: Server, host: str) -> None:
    setup = Setup(server)
    error = await setup.fails(f"https://{host}/a.png", "media_url_refused")
    assert setup.network.attempts == []
    assert host == PRIVATE or PRIVATE not in error.message


@pytest.mark.parametrize(
    "location",
    [
        "https://private.example/a.png",
        "https://mixed.example/a.png",
        f"https://{PRIVATE}/a.png",
        "http://private.example/a.png",
        "http://good.example:1/a.png",
        "//private.example/a.png",
        "file:///etc/passwd",
        "https://user:secret@other.example/",
        "https://",
    ],
)
async def test_fc16_every_redirect_is_judged(server: Server, location: str) -> None:
    server.redirect("/start", location)
    setup = Setup(server, "good.example:80")
    error = await setup.fails("http://good.example/start", "media_url_refused")
    assert setup.network.attempts == [f"{PUBLIC}:80"]
    assert "private" not in error.message and PRIVATE not in error.message


async def test_fc16_a_name_that_changes_its_address_is_refused(tmp_path: Path) -> None:
    """The second connection resolves again, and what it finds is judged again."""
    serves, trusts = certificate(tmp_path, "rebinding.example")
    async with serving(serves) as tls_server:
        tls_server.redirect("/start", "https://rebinding.example/a.png")
        setup = Setup(tls_server, tls=trusts)
        await setup.fails("https://rebinding.example/start", "media_url_refused")
    assert setup.names.asked == ["rebinding.example"] * 2
    assert setup.network.attempts == [f"{PUBLIC}:443"]


@pytest.mark.parametrize("path", ["/4", "/loop"])
async def test_too_many_redirects(server: Server, path: str) -> None:
    setup = Setup(server, "localhost")
    await setup.fails(f"http://localhost{path}", "media_url_refused")
    assert len(server.requests) == 4


PUBLIC_BEFORE = [f"{PUBLIC}:80"]
"""The one connection that may be made before a refusal: to the server that sends us on, or misbehaves."""


@pytest.mark.parametrize(
    ("url", "code", "attempts"),
    [
        ("http://good.example/to-loopback", "media_url_refused", PUBLIC_BEFORE),
        ("http://good.example/to-metadata", "media_url_refused", PUBLIC_BEFORE),
        ("http://good.example/to-file", "media_url_refused", PUBLIC_BEFORE),
        ("http://good.example/loop", "media_url_refused", PUBLIC_BEFORE),
        ("https://private.example/a.png", "media_url_refused", []),
        ("https://mixed.example/a.png", "media_url_refused", []),
        ("https://[::ffff:127.0.0.1]/a.png", "media_url_refused", []),
        ("https://[::ffff:7f00:1]/a.png", "media_url_refused", []),
        ("https://2130706433/a.png", "media_url_refused", []),
        ("https://0177.0.0.1/a.png", "media_url_refused", []),
        ("https://0x7f000001/a.png", "media_url_refused", []),
        ("https://127.1/a.png", "media_url_refused", []),
        ("https://\N{FULLWIDTH DIGIT ONE}27.0.0.1/a.png", "media_url_refused", []),
        ("https://127.0.0.1./a.png", "media_url_refused", []),
        ("https://169.254.169.254/latest/meta-data/", "media_url_refused", []),
        ("https://[fd00:ec2::254]/latest/meta-data/", "media_url_refused", []),
        ("file:///etc/passwd", "media_url_refused", []),
        ("gopher://good.example/_x", "media_url_refused", []),
        ("ftp://good.example/a.png", "media_url_refused", []),
        ("unix:///run/docker.sock", "media_url_refused", []),
        ("https://user:secret@good.example/", "media_url_refused", []),
        ("https://good.example@127.0.0.1/", "media_url_refused", []),
        ("http://good.example/drips", "media_fetch_timeout", PUBLIC_BEFORE),
        ("http://good.example/drips-headers", "media_fetch_timeout", PUBLIC_BEFORE),
        ("http://good.example/hangs", "media_fetch_timeout", PUBLIC_BEFORE),
        ("http://good.example/endless-body", "media_too_large", PUBLIC_BEFORE),
        ("http://good.example/endless-chunks", "media_too_large", PUBLIC_BEFORE),
        ("http://good.example/endless-headers", "media_fetch_failed", PUBLIC_BEFORE),
        ("http://good.example/bomb", "media_fetch_failed", PUBLIC_BEFORE),
    ],
)
async def test_the_list_of_attacks(
    server: Server, url: str, code: str, attempts: list[str]
) -> None:
    """Refused within its limits, with no connection but those that are allowed."""
    setup = Setup(server, "good.example:80", timeout_s=0.5 if "timeout" in code else 10.0)
    started = time.monotonic()
    error = await setup.fails(url, code)
    assert time.monotonic() - started < 10
    assert set(setup.network.attempts) == set(attempts)
    assert "secret" not in error.message


async def test_a_page_is_no_picture_whatever_its_url_says(server: Server) -> None:
    """The type that the server states goes on to the check."""
    async with Setup(server, "localhost").fetcher as fetcher:
        found = await fetcher.fetch("http://localhost/page", PLACE)
    async with PictureChecker(IngestLimits(decode_workers=1)) as checker:
        with pytest.raises(UnsupportedMediaError, match="text/html"):
            await checker.check(found.data, declared=found.content_type, place=PLACE)


@pytest.mark.parametrize("allow", ["localhost:1", "example", "good.example.", "xlocalhost"])
async def test_the_allow_list_is_exact(server: Server, allow: str) -> None:
    setup = Setup(server, allow)
    await setup.fails("http://localhost:2/a.png", "media_url_refused")
    assert setup.network.attempts == []


# What fails.


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/missing", "404"),
        ("/error", "503"),
        ("/nowhere", "302"),
        ("/gzip", "compressed"),
        ("/breaks-off", "broke off"),
        ("/not-http", "broke off"),
    ],
)
async def test_bad_answers(server: Server, path: str, text: str) -> None:
    error = await Setup(server, "localhost").fails(f"http://localhost{path}", "media_fetch_failed")
    assert error.status == 400
    assert text in error.message and "'localhost'" in error.message


@pytest.mark.parametrize("host", ["unknown.example", "93.184.216.99"])
async def test_hosts_that_cannot_be_reached(server: Server, host: str) -> None:
    await Setup(server).fails(f"https://{host}/", "media_fetch_failed")


@pytest.mark.parametrize("path", ["/claims-much", "/sends-much"])
async def test_fc16_too_large(server: Server, path: str) -> None:
    error = await Setup(server, "localhost").fails(f"http://localhost{path}", "media_too_large")
    assert isinstance(error, TooLargeError)


async def test_the_size_limit_is_inclusive(server: Server) -> None:
    async with Setup(server, "localhost").fetcher as fetcher:
        found = await fetcher.fetch("http://localhost/exact", PLACE)
    assert len(found.data) == MAX_BYTES


async def test_fc16_time_is_limited_and_the_server_is_left(server: Server) -> None:
    setup = Setup(server, "localhost", timeout_s=0.05)
    error = await setup.fails("http://localhost/hangs", "media_fetch_timeout")
    assert error.status == 400
    await asyncio.wait_for(server.hung_up.wait(), 5)


async def test_slow_name_resolution_counts(server: Server) -> None:
    async def never(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    setup = Setup(server, timeout_s=0.05, resolver=never)
    await setup.fails("https://good.example/", "media_fetch_timeout")


@asynccontextmanager
async def crowd(server: Server, count: int, **options: Any) -> AsyncIterator[MediaFetcher]:
    """A fetcher while a tenant, ``crowd``, fetches from a host that never answers."""
    async with Setup(server, "localhost", several=lambda: True, **options).fetcher as fetcher:
        fetches = [
            asyncio.ensure_future(fetcher.fetch("http://localhost/hangs", PLACE, owner="crowd"))
            for _ in range(count)
        ]
        await server.arrived.wait()
        try:
            yield fetcher
        finally:
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)


async def test_hosts_that_hang_hold_up_their_tenant_alone(server: Server) -> None:
    async with crowd(server, 20, max_connections=4) as fetcher:
        for _ in range(3):
            async with asyncio.timeout(5):
                found = await fetcher.fetch("http://localhost/a.png", PLACE, owner="other")
            assert found == FetchedMedia(BYTES, "image/png")
        assert len(server.requests) == 2 + 3


async def test_waiting_for_a_connection_is_not_the_hosts_time(server: Server) -> None:
    options = {"max_connections": 1, "timeout_s": 0.1}
    async with Setup(server, "localhost", **options).fetcher as fetcher:
        await fetcher._places.take("")
        with pytest.raises(BusyError) as caught:
            await fetcher.fetch("http://localhost/a.png", PLACE)
        assert server.requests == []
        assert (caught.value.code, caught.value.param) == ("media_fetch_busy", PLACE)
        assert caught.value.retry_after_s and "host" not in caught.value.message


@pytest.mark.slow
async def test_who_waited_has_all_of_his_time(server: Server) -> None:
    options = {"max_connections": 1, "timeout_s": 1.0}
    async with Setup(server, "localhost", **options).fetcher as fetcher:
        hanging = asyncio.ensure_future(fetcher.fetch("http://localhost/hangs", PLACE))
        await server.arrived.wait()
        asyncio.get_running_loop().call_later(0.7, hanging.cancel)
        with pytest.raises(BadRequestError) as caught:
            started = time.monotonic()
            await fetcher.fetch("http://localhost/hangs", PLACE)
        assert caught.value.code == "media_fetch_timeout"
        assert time.monotonic() - started > 1.6


async def test_too_many_that_wait_are_refused_at_once(server: Server) -> None:
    async with crowd(server, 1 + WAITING_EACH // 2, max_connections=1) as fetcher:
        for owner, waits in (("crowd", False), ("other", True)):
            fetch = asyncio.ensure_future(
                fetcher.fetch("http://localhost/a.png", PLACE, owner=owner)
            )
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert fetch.done() is not waits
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)


async def test_cancelling_leaves_the_server(server: Server) -> None:
    async with Setup(server, "localhost").fetcher as fetcher:
        fetch = asyncio.ensure_future(fetcher.fetch("http://localhost/hangs", PLACE))
        await server.arrived.wait()
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        await asyncio.wait_for(server.hung_up.wait(), 5)


async def test_the_systems_resolver(server: Server) -> None:
    """Spellings of loopback that only the resolver understands are refused by what they mean."""
    for host in ("localhost", "2130706433", "0x7f.1", "127.1"):
        network = Network(server.port)
        fetcher = MediaFetcher(max_bytes=1, timeout_s=10, network=network)
        async with fetcher:
            with pytest.raises(BadRequestError) as caught:
                await fetcher.fetch(f"https://{host}/", PLACE)
        assert caught.value.code == "media_url_refused"
        assert network.attempts == []


# Addresses.


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.0.0.1",
        "100.64.0.1",
        "100.100.100.200",
        "127.0.0.1",
        "168.63.129.16",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.8",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::10.0.0.1",
        "64:ff9b::127.0.0.1",
        "64:ff9b:1::1.1.1.1",
        "100::1",
        "2001:db8::1",
        "2001::1",
        "2002:a00:1::1",
        "2002:7f00:1::",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
        "ff0e::1",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "8.8.8.8",
        PUBLIC,
        "172.32.0.1",
        "2606:4700::1111",
        "2a00:1450::1",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
        "2002:808:808::1",
    ],
)
def test_addresses_that_are(address: str) -> None:
    assert is_public(address)


def test_allow_list() -> None:
    assert parse_allowed_hosts(" a.example, B.example:8080,,[::1]:80 ,10.0.0.1,") == (
        AllowedHost("a.example"),
        AllowedHost("b.example", 8080),
        AllowedHost("::1", 80),
        AllowedHost("10.0.0.1"),
    )
    assert parse_allowed_hosts("") == ()


@pytest.mark.parametrize(
    "text",
    ["http://a.example", "a.example/path", "a:b", "a:70000", "u@a", ":80", "*.example", "[::1"],
)
def test_allow_list_entries_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not a host"):
        parse_allowed_hosts(f"good.example,{text}")
