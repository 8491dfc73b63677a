"""Tenants of one system: none can use another's embeddings or files, nor learn that they are there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from direct import Inbox, direct_job
from epd_common.api_keys import ApiKey, hash_key
from epd_common.ingest import Picture, PictureChecker
from epd_common.protocol import Item, Media, encode, subjects
from epd_common.protocol.keys import digest, embedding_key
from epd_gateway.addresses import parse_allowed_hosts
from fake_engine import answer_text
from service_stack import CHAT, ServiceStack, bare_stack, eventually, picture, text_of

pytestmark = pytest.mark.slow  # many brokers or processes of its own

TENANTS = {
    "a": ApiKey(hash=hash_key(b"a"), tenant="alpha"),
    "a2": ApiKey(hash=hash_key(b"a2"), tenant="alpha", name="second"),
    "b": ApiKey(hash=hash_key(b"b"), tenant="beta"),
    "s": ApiKey(hash=hash_key(b"s"), tenant="sigma", cache_scope="shared"),
    "t": ApiKey(hash=hash_key(b"t"), tenant="tau", cache_scope="shared"),
}


class Tenants:
    """A stack whose requests come from holders of different keys."""

    def __init__(self, stack: ServiceStack) -> None:
        self.stack = stack

    def by(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    async def post(self, key: str, body: dict[str, Any]) -> httpx.Response:
        return await self.stack.http.post(CHAT, json=body, headers=self.by(key))

    async def origin(self, key: str, *pictures: bytes) -> str:
        """What became of the pictures of a right answer."""
        answer = await self.post(key, self.stack.body("x", *pictures))
        assert text_of(answer) == answer_text("x", *pictures)
        return str(answer.headers["x-epd-items"])

    async def upload(self, key: str, data: bytes) -> str:
        form: dict[str, Any] = {"data": {"purpose": "vision"}, "files": {"file": ("a.png", data)}}
        made = await self.stack.http.post("/v1/files", headers=self.by(key), **form)
        assert made.status_code == 200, made.text
        return str(made.json()["id"])

    async def ask_file(self, key: str, file_id: str) -> httpx.Response:
        body = self.stack.body("file")
        part = {"type": "image_file", "image_file": {"file_id": file_id}}
        body["messages"][0]["content"].insert(0, part)
        return await self.post(key, body)

    def embedding(self, data: bytes, scope: str) -> str:
        return embedding_key(
            media_digest=digest(data), fingerprint=self.stack.fingerprint, scope=scope
        )

    async def ready(self, data: bytes, scope: str) -> bool:
        """Whether whoever asks is told that the embedding is there."""
        name = f"epd:v1:state:{self.embedding(data, scope)}"
        return await self.stack.redis.hget(name, "state") == b"ready"

    @property
    def encoded(self) -> list[str]:
        return list(self.stack.encoders[0].engine.encoded)


@contextlib.asynccontextmanager
async def opened(
    nats_url: str, redis_url: str, folder: Path, **settings: Any
) -> AsyncIterator[Tenants]:
    async with bare_stack(nats_url, redis_url, folder) as stack:
        await stack.add_encoder()
        await stack.add_pd()
        await stack.add_gateway(api_keys=tuple(TENANTS.values()), **settings)
        stack.http.headers["authorization"] = "Bearer a"
        await stack.ready()
        yield Tenants(stack)


@pytest.fixture(scope="module")
async def tenants(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Tenants]:
    async with opened(nats_url, redis_url, tmp_path_factory.mktemp("tenants")) as running:
        yield running


# -- embeddings -------------------------------------------------------------------------------------


async def test_fc14_equal_bytes_of_two_tenants_are_two_items(tenants: Tenants) -> None:
    data = picture()
    before = len(tenants.encoded)
    assert await tenants.origin("a", data) == "encoded"
    assert await tenants.origin("a", data) == "reused"
    assert await tenants.origin("b", data) == "encoded", "that somebody has it is not to be seen"
    assert await tenants.origin("b", data) == "reused"
    keys = [tenants.embedding(data, scope) for scope in ("alpha", "beta")]
    assert tenants.encoded[before:] == keys
    assert len(set(keys)) == 2


async def test_keys_of_one_tenant_share(tenants: Tenants) -> None:
    data = picture()
    assert await tenants.origin("a", data) == "encoded"
    assert await tenants.origin("a2", data) == "reused"


async def test_an_encode_under_way_is_joined_by_its_tenant_alone(tenants: Tenants) -> None:
    data = picture()
    engine = tenants.stack.encoders[0].engine
    before = len(tenants.encoded)
    engine.gate.clear()
    try:
        asking = [asyncio.create_task(tenants.origin(key, data)) for key in ("a", "b")]
        await eventually(lambda: len(tenants.encoded) == before + 2, "both are being encoded")
    finally:
        engine.gate.set()
    assert await asyncio.gather(*asking) == ["encoded", "encoded"]


async def test_what_failed_for_one_tenant_is_tried_for_another(tenants: Tenants) -> None:
    """The memory of bytes that cannot be encoded is by tenant, too."""
    data = picture()
    engine = tenants.stack.encoders[0].engine
    engine.refuse = data
    assert (await tenants.post("a", tenants.stack.body("x", data))).status_code == 400
    engine.refuse = None
    assert (await tenants.post("a", tenants.stack.body("x", data))).status_code == 400
    assert await tenants.origin("b", data) == "encoded"


async def test_keys_that_share_do_so_among_themselves(tenants: Tenants) -> None:
    data = picture()
    assert await tenants.origin("a", data) == "encoded"
    assert await tenants.origin("s", data) == "encoded"
    assert await tenants.origin("t", data) == "reused"
    assert await tenants.origin("b", data) == "encoded"
    assert tenants.embedding(data, "") in tenants.encoded


async def test_a_shared_scope_for_all(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    async with opened(nats_url, redis_url, tmp_path, cache_scope="shared") as tenants:
        data = picture()
        assert await tenants.origin("a", data) == "encoded"
        assert await tenants.origin("b", data) == "reused"
        await check_files_are_private(tenants)


@pytest.mark.parametrize("field", ["scope", "tenant", "user", "cache_salt"])
async def test_a_body_cannot_name_a_scope(tenants: Tenants, field: str) -> None:
    data = picture()
    assert await tenants.origin("a", data) == "encoded"
    answer = await tenants.post("b", tenants.stack.body("x", data, **{field: "alpha"}))
    assert answer.headers.get("x-epd-items", "encoded") == "encoded"


# -- uploads ----------------------------------------------------------------------------------------


async def check_files_are_private(tenants: Tenants) -> None:
    data = picture()
    file_id = await tenants.upload("a", data)
    unknown = file_id[:-1] + ("0" if file_id[-1] != "0" else "1")
    http = tenants.stack.http

    async def seen(key: str, file: str) -> list[tuple[int, str]]:
        answers = [
            await http.get(f"/v1/files/{file}", headers=tenants.by(key)),
            await http.get(f"/v1/files/{file}/content", headers=tenants.by(key)),
            await tenants.ask_file(key, file),
            await http.delete(f"/v1/files/{file}", headers=tenants.by(key)),
        ]
        return [(answer.status_code, answer.text.replace(file, "ID")) for answer in answers]

    for key in ("b", "s"):
        assert [status for status, _ in await seen(key, file_id)] == [404] * 4
        assert await seen(key, file_id) == await seen(key, unknown), "no sign that it is there"
    assert text_of(await tenants.ask_file("a2", file_id)) == answer_text("file", data)
    assert [status for status, _ in await seen("a", file_id)] == [200] * 4


async def test_files_are_private(tenants: Tenants) -> None:
    await check_files_are_private(tenants)


async def test_an_upload_is_encoded_for_its_tenant(tenants: Tenants) -> None:
    data = picture()
    file_id = await tenants.upload("b", data)
    await eventually(lambda: tenants.ready(data, "beta"), "it is encoded at once")
    assert await tenants.origin("a", data) == "encoded"
    answer = await tenants.ask_file("b", file_id)
    assert text_of(answer) == answer_text("file", data)
    assert answer.headers["x-epd-items"] == "reused"


async def test_a_shared_keys_upload_is_encoded_for_all_that_share(tenants: Tenants) -> None:
    data = picture()
    file_id = await tenants.upload("s", data)
    await eventually(lambda: tenants.ready(data, ""), "it is encoded")
    answer = await tenants.ask_file("s", file_id)
    assert answer.headers["x-epd-items"] == "reused"
    assert await tenants.origin("t", data) == "reused"


# -- media by digest --------------------------------------------------------------------------------


async def test_nobody_gets_bytes_by_naming_their_digest(tenants: Tenants) -> None:
    """Media lie in the store under their digest; no body can name one."""
    data = picture()
    assert await tenants.origin("a", data) == "encoded"
    named = digest(data)
    item = {"modality": "image", "digest": named, "media": {"ref": named}}
    item["key"] = tenants.embedding(data, "beta")
    parts: tuple[dict[str, Any], ...] = (
        {"type": "media_ref", "item": 0},
        {"type": "media_ref", "item": item},
        {"type": "media_ref", "media": {"ref": named}},
        {"type": "image_file", "image_file": {"file_id": named}},
        {"type": "input_image", "file_id": named},
        {"type": "image_url", "image_url": {"url": named}},
        {"type": "image_url", "image_url": {"url": f"epd:{named}"}},
        {"type": "image_embeds", "image_embeds": {}, "uuid": item["key"]},
    )
    for part in parts:
        body = tenants.stack.body("x", items=[item])
        body["messages"][0]["content"].insert(0, part)
        answer = await tenants.post("b", body)
        assert answer.status_code in (400, 404), answer.text
        assert "x-epd-items" not in answer.headers


async def test_fc14_a_jobs_key_is_of_its_own_scope(tenants: Tenants) -> None:
    """A direct job names its scope itself (its sender is trusted with that), but cannot mix two."""
    data = picture()
    assert await tenants.origin("a", data) == "encoded"
    item = Item(
        media=Media(ref=digest(data)), digest=digest(data), key=tenants.embedding(data, "alpha")
    )
    stack = tenants.stack
    inbox = await Inbox().listen(stack.bus)
    body = b'{"messages": [{"role": "user", "content": [{"type": "media_ref", "item": 0}]}]}'
    job = direct_job(stack, inbox, items=[item], scope="beta", body=body)
    await stack.bus.js.publish(subjects.generate_subject(stack.model, "l0"), encode(job))
    assert (await inbox.error()).code == "key_mismatch"


# -- turns ------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def web(page: bytes) -> AsyncIterator[tuple[str, asyncio.Semaphore]]:
    """A host that answers ``/good`` alone; its URL, and what counts the requests for others."""
    hanging = asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            request = await reader.readuntil(b"\r\n\r\n")
            if request.split()[1] != b"/good":
                hanging.release()
                await reader.read()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(page), page))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://localhost:{server.sockets[0].getsockname()[1]}", hanging


async def test_urls_that_hang_hold_up_their_tenant_alone(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Ten requests with eight such URLs each want more connections than there are."""
    data = picture()

    def body(tenants: Tenants, *urls: str) -> dict[str, Any]:
        made = tenants.stack.body("x")
        for url in reversed(urls):
            part = {"type": "image_url", "image_url": {"url": url}}
            made["messages"][0]["content"].insert(0, part)
        return made

    async with web(data) as (url, hanging):
        allowed = parse_allowed_hosts(url.removeprefix("http://"))
        async with opened(nats_url, redis_url, tmp_path, media_allow_hosts=allowed) as tenants:
            crowd = [
                asyncio.create_task(
                    tenants.post("a", body(tenants, *(f"{url}/{n}/{m}" for m in range(8))))
                )
                for n in range(10)
            ]
            try:
                for _ in range(32):
                    await asyncio.wait_for(hanging.acquire(), 10)
                started = time.monotonic()
                answer = await tenants.post("b", body(tenants, f"{url}/good"))
                assert text_of(answer) == answer_text("x", data)
                assert time.monotonic() - started < 5
                assert hanging.locked(), "the crowd has half of the connections"
            finally:
                for task in crowd:
                    task.cancel()
                await asyncio.gather(*crowd, return_exceptions=True)


async def test_pictures_are_decoded_in_the_turns_of_their_tenants(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they share of the cache."""
    owners: list[str] = []
    check = PictureChecker.check

    async def noted(self: PictureChecker, data: bytes, **options: Any) -> Picture:
        owners.append(options["owner"])
        assert options["digest"] == digest(data)
        return await check(self, data, **options)

    monkeypatch.setattr(PictureChecker, "check", noted)
    for key in ("a", "b", "s"):
        await tenants.origin(key, picture())
        await tenants.upload(key, picture())
    assert owners == ["alpha", "alpha", "beta", "beta", "sigma", "sigma"]
