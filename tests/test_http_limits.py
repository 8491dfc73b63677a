"""What a connection may send, and how slowly, over raw sockets: heads, bodies and uploads without an end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from epd_gateway import http_limits
from epd_gateway.http_limits import MAX_PIPELINED
from service_stack import ServiceStack, bare_stack, eventually

POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
FORM = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=B\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n"
OPENED = b'--B\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
SOON_S = 0.3
BOUND_S = 15.0


@pytest.fixture(scope="module")
async def stack(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServiceStack]:
    """A gateway alone: nothing here gets further."""
    async with bare_stack(nats_url, redis_url, tmp_path_factory.mktemp("limits")) as running:
        await running.add_gateway(max_body_bytes=100_000, body_timeout_s=SOON_S)
        yield running


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HEAD_S", SOON_S)
    monkeypatch.setattr(http_limits, "LINGER_S", SOON_S)


class Raw:
    """A connection that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def drip(self, piece: bytes, every_s: float = 0.02) -> None:
        """Send the same again and again until the other side has had enough."""
        with contextlib.suppress(ConnectionError):
            while not self.reader.at_eof():
                await self.say(piece)
                await asyncio.sleep(every_s)

    async def answer(self) -> tuple[int, Any]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(status.split()[1]), json.loads(body)

    async def refused(self, status: int, code: str) -> None:
        found, body = await self.answer()
        assert (found, body["error"]["code"]) == (status, code), body
        assert {"message", "type", "param", "code"} <= set(body["error"])

    async def closed(self) -> None:
        with contextlib.suppress(ConnectionError):
            assert await self.reader.read() == b""


@contextlib.asynccontextmanager
async def connected(stack: ServiceStack) -> AsyncIterator[Raw]:
    url = stack.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        async with asyncio.timeout(BOUND_S):
            yield Raw(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    assert (await stack.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        HEALTH + b"".join(b"x-%d: y\r\n" % n for n in range(100)) + b"\r\n",
        HEALTH + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
        HEALTH + b"x" * 70_000 + b": y\r\n\r\n",
        b"GET /health?" + b"y" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        HEALTH + b"".join(b"x-%d: %s\r\n" % (n, b"y" * 900) for n in range(90)) + b"\r\n",
        HEALTH + b"x: " + b"y" * 300_000,  # without an end
    ],
    ids=["many", "long value", "long name", "long line", "many long", "endless"],
)
async def test_heads_have_a_size(stack: ServiceStack, head: bytes) -> None:
    async with connected(stack) as raw:
        with contextlib.suppress(ConnectionError):
            await raw.say(head)
        await raw.refused(431, "headers_too_large")
        await raw.closed()


async def test_one_connection_may_ask_often(stack: ServiceStack) -> None:
    """Each head counts by itself."""
    async with connected(stack) as raw:
        for _ in range(30):
            await raw.say(HEALTH + b"x: " + b"y" * 4000 + b"\r\n\r\n")
            assert await raw.answer() == (200, {"status": "ok"})


@pytest.mark.slow
async def test_an_idle_connection_outlives_what_clients_keep(stack: ServiceStack) -> None:
    """Many keep theirs for 5 s, and what is sent while the other side closes is lost."""
    async with connected(stack) as raw:
        for pause_s in (6.0, 0.0):
            await raw.say(HEALTH + b"\r\n")
            assert await raw.answer() == (200, {"status": "ok"})
            await asyncio.sleep(pause_s)


async def test_who_says_nothing_is_not_kept(stack: ServiceStack, soon: None) -> None:
    async with connected(stack) as raw:
        await raw.refused(408, "request_timeout")
        await raw.closed()


@pytest.mark.parametrize("opened", [b"", HEALTH + b"\r\n"], ids=["first", "second"])
async def test_heads_have_a_time(stack: ServiceStack, soon: None, opened: bytes) -> None:
    """However often a further byte comes."""
    async with connected(stack) as raw:
        if opened:
            await raw.say(opened)
            assert (await raw.answer())[0] == 200
        started = time.monotonic()
        await raw.say(b"GET /health HTTP/1.1\r\n")
        async with asyncio.TaskGroup() as group:
            group.create_task(raw.drip(b"x: y\r\n"))
            await raw.refused(408, "request_timeout")
        assert time.monotonic() - started >= SOON_S * 0.9


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (POST + b"content-length: 5000\r\n\r\n{", b" "),
        (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"1\r\n \r\n"),
        (FORM + b"content-length: 5000\r\n\r\n" + OPENED, b"z"),
    ],
    ids=["length", "chunked", "upload"],
)
async def test_bodies_have_a_time(
    stack: ServiceStack, soon: None, head: bytes, piece: bytes
) -> None:
    async with connected(stack) as raw:
        await raw.say(head)
        async with asyncio.TaskGroup() as group:
            group.create_task(raw.drip(piece))
            await raw.refused(408, "request_timeout")
            await raw.closed()


async def test_a_chunked_body_without_end_is_left(stack: ServiceStack, soon: None) -> None:
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    async with connected(stack) as raw:
        await raw.say(POST + b"transfer-encoding: chunked\r\n\r\n")
        async with asyncio.TaskGroup() as group:
            group.create_task(raw.drip(chunk, every_s=0))
            await raw.refused(413, "body_too_large")
            await raw.closed()


async def test_who_finishes_after_his_answer_keeps_his_connection(stack: ServiceStack) -> None:
    async with connected(stack) as raw:
        await raw.say(POST + b"content-length: 200000\r\n\r\n{")
        await raw.refused(413, "body_too_large")
        await raw.say(b" " * 199_999)
        await raw.say(HEALTH + b"\r\n")
        assert await raw.answer() == (200, {"status": "ok"})


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n",
        POST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_http(stack: ServiceStack, junk: bytes) -> None:
    async with connected(stack) as raw:
        await raw.say(junk)
        await raw.refused(400, "invalid_http")
        await raw.closed()


def part(name: str, content: bytes = b"vision", more: str = "") -> bytes:
    head = f'--B\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + content + b"\r\n"


FILE = part("file", b"x", '; filename="a.png"')


@pytest.mark.parametrize(
    ("parts", "status", "code", "param"),
    [
        (part("purpose") + FILE + FILE, 400, "invalid_request", None),
        (part("purpose") * 9 + FILE, 400, "invalid_request", None),
        (part("purpose", b"x" * 5000) + FILE, 400, "invalid_request", None),
        (
            part("purpose") + part("file", b"x", f'; filename="{"n" * 300}"'),
            400,
            "invalid_request",
            "file",
        ),
        (part("purpose") + FILE, 415, "unsupported_media", "file"),
    ],
    ids=["two files", "many fields", "large field", "long name", "as it should be"],
)
async def test_parts_of_an_upload(
    stack: ServiceStack, parts: bytes, status: int, code: str, param: str | None
) -> None:
    body = parts + b"--B--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=B"}
    response = await stack.http.post("/v1/files", content=body, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), error


async def test_an_upload_says_its_length(stack: ServiceStack) -> None:
    async with connected(stack) as raw:
        await raw.say(FORM + b"transfer-encoding: chunked\r\n\r\n1\r\n-\r\n0\r\n\r\n")
        await raw.refused(400, "length_required")


PIPELINED = b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_few_requests_at_once_are_all_answered(stack: ServiceStack) -> None:
    async with connected(stack) as raw:
        for _ in range(3):
            await raw.say(b"".join(HEALTH + b"x: %d\r\n\r\n" % n for n in range(MAX_PIPELINED)))
            for _ in range(MAX_PIPELINED):
                assert await raw.answer() == (200, {"status": "ok"})


def flood(address: tuple[str, int], count: int) -> int:
    """Send so many requests in one piece; how many are answered until the connection ends."""
    received = bytearray()
    with socket.create_connection(address, timeout=BOUND_S) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(PIPELINED * count)
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                received += piece
    assert received.count(b"connection: close") <= 1
    return received.count(b"HTTP/1.1 404")


async def test_the_connection_ends_where_too_many_wait(stack: ServiceStack) -> None:
    url = stack.http.base_url
    address = (url.host, url.port or 0)
    assert await asyncio.to_thread(flood, address, 5000) <= MAX_PIPELINED + 1


async def test_the_last_of_too_many_says_so(stack: ServiceStack) -> None:
    async with connected(stack) as raw:
        await raw.say(PIPELINED * (MAX_PIPELINED + 2))
        for _ in range(MAX_PIPELINED):
            await raw.refused(404, "unknown_route")
        assert b"connection: close" in await raw.reader.readuntil(b"\r\n\r\n")


class Paused:
    """An application whose requests are answered when the test says so."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gone: list[str] = []
        self.go = asyncio.Semaphore(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.append(scope["path"])
        answering = asyncio.ensure_future(self.go.acquire())
        while not answering.done():
            told = asyncio.ensure_future(receive())
            await asyncio.wait((answering, told), return_when=asyncio.FIRST_COMPLETED)
            if told.done() and told.result()["type"] == "http.disconnect":
                self.gone.append(scope["path"])
                answering.cancel()
                return
            told.cancel()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


class Transport(asyncio.Transport):
    """A connection that keeps what is written, and whether it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.closed, self.written = True, False, b""

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


@contextlib.asynccontextmanager
async def protocol() -> AsyncIterator[tuple[http_limits.BoundedHttp, Transport, Paused]]:
    app = Paused()
    config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none")
    config.load()
    made, transport = http_limits.BoundedHttp(config, ServerState(), {}), Transport()
    made.connection_made(transport)
    try:
        yield made, transport, app
    finally:
        made.connection_lost(None)
        for task in list(made.tasks):
            await task


def numbered(*numbers: int) -> bytes:
    return b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % n for n in numbers)


async def test_nothing_is_read_while_requests_wait() -> None:
    async with protocol() as (http, transport, app):
        http.data_received(numbered(0, 1, 2))
        for n in (1, 2):
            await eventually(lambda n=n: len(app.begun) == n, f"{n} begins")
            assert not transport.reading, n
            app.go.release()
        await eventually(lambda: len(app.begun) == 3 and transport.reading, "the last begins")
        app.go.release()
        await eventually(lambda: transport.written.count(b"HTTP/1.1 200") == 3, "all are answered")
        assert app.begun == ["/0", "/1", "/2"]


async def test_nothing_more_is_read_once_too_many_wait() -> None:
    async with protocol() as (http, transport, app):
        http.data_received(numbered(*range(10_000)))
        assert len(http.pipeline) == MAX_PIPELINED
        http.data_received(numbered(*range(100)))
        assert len(http.pipeline) == MAX_PIPELINED
        for n in range(MAX_PIPELINED + 1):
            await eventually(lambda n=n: len(app.begun) == n + 1, f"{n} begins")
            assert not transport.reading
            app.go.release()
        await eventually(lambda: transport.closed, "it is closed")
        assert transport.written.count(b"HTTP/1.1 200") == MAX_PIPELINED + 1
        assert transport.written.count(b"connection: close") == 1


async def test_the_request_that_runs_learns_that_its_client_has_gone() -> None:
    """Also where others wait behind it, which begin no more."""
    async with protocol() as (http, _, app):
        http.data_received(numbered(0, 1, 2))
        await eventually(lambda: app.begun == ["/0"], "the first begins")
        http.connection_lost(ConnectionResetError())
        await eventually(lambda: app.gone == ["/0"], "it is told")
    assert app.begun == ["/0"]


async def test_an_answer_ends_nothing_of_the_body_behind_it(soon: None) -> None:
    async with protocol() as (http, transport, app):
        http.data_received(numbered(0) + POST + b"content-length: 5\r\n\r\n{")
        app.go.release()
        await eventually(lambda: len(app.begun) == 2, "the next begins")
        await asyncio.sleep(SOON_S * 1.5)
        assert not transport.closed
        http.data_received(b"    ")
        app.go.release()
        await eventually(lambda: transport.written.count(b"HTTP/1.1 200") == 2, "both are answered")


async def test_junk_behind_a_request_is_answered_once() -> None:
    async with protocol() as (http, transport, app):
        http.data_received(numbered(0, 1) + b"junk\r\n\r\n")
        await eventually(lambda: app.begun == ["/0"], "the first begins")
        app.go.release()
        await eventually(lambda: not http.tasks, "it has ended")
        assert transport.closed
        assert transport.written.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("path", [b"/", b"/health", b"/v1/chat/completions"])
async def test_a_websocket_is_told_that_there_are_none(stack: ServiceStack, path: bytes) -> None:
    async with connected(stack) as raw:
        await raw.say(
            b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: keep-alive, Upgrade\r\nupgrade: WebSocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            % path
        )
        await raw.refused(400, "upgrade_not_supported")
        await raw.closed()


async def test_an_offer_of_another_protocol_is_passed_over(stack: ServiceStack) -> None:
    """Java's client and curl's offer HTTP/2 so."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n\r\n"
    async with connected(stack) as raw:
        for _ in range(2):
            await raw.say(HEALTH + offer)
            assert await raw.answer() == (200, {"status": "ok"})
        await raw.say(HEALTH + b"\r\n")
        assert await raw.answer() == (200, {"status": "ok"})
