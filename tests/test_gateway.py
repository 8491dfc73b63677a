"""The HTTP edge: bad input, files, health, and what it does when something behind it is away."""

from __future__ import annotations

import asyncio
import io
import json
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from epd_cli.brokers import Brokers, embedded_brokers
from epd_common.ingest.data_uri import make_data_uri
from fake_engine import MAX_MODEL_LEN, answer_text, tag
from service_stack import (
    CHAT,
    ServiceStack,
    bare_stack,
    broken_part,
    eventually,
    image_part,
    picture,
    service_stack,
    text_of,
)

MAX_BODY = 1 << 20
MAX_MEDIA = 100_000
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
async def stack(
    nats_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServiceStack]:
    """All services, and a gateway with limits that a test can go over."""
    async with bare_stack(nats_url, redis_url, tmp_path_factory.mktemp("gateway")) as running:
        await running.add_encoder()
        await running.add_pd()
        await running.add_gateway(
            max_body_bytes=MAX_BODY, max_media_bytes=MAX_MEDIA, max_pixels=1_000_000, max_items=4
        )
        await running.ready()
        yield running


def check_error(response: httpx.Response, status: int, code: str, param: str | None = None) -> None:
    """OpenAI's error shape, with these values; ``param`` may be the beginning of it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["code"] == code, error
    assert error["param"] == param, error
    default = "invalid_request_error" if status < 500 else "server_error"
    special = {404: "not_found_error", 429: "rate_limit_error"}
    assert error["type"] == special.get(status, default)


async def still_works(stack: ServiceStack) -> None:
    data = picture()
    assert text_of(await stack.ask("good", data)) == answer_text("good", data)


async def post(stack: ServiceStack, content: bytes, route: str = CHAT) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return await stack.http.post(route, content=content, headers=headers)


# -- bodies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{} {}",
        b"\xff\xfe\x00",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": "\\ud800"}',
        b'{"\\udc00": 1}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\x01"}',
        b"{'a': 1}",
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b"[" * 100_000,
    ],
)
async def test_body_that_is_no_json(stack: ServiceStack, raw: bytes) -> None:
    for route in (CHAT, COMPLETIONS):
        check_error(await post(stack, raw, route), 400, "invalid_json", "body")
    await still_works(stack)


async def test_body_nested_too_deep(stack: ServiceStack) -> None:
    tools = b'{"a":' * 200 + b"1" + b"}" * 200
    raw = json.dumps(stack.body("deep", tools=[])).encode().replace(b"[]", b"[%s]" % tools, 1)
    check_error(await post(stack, raw), 400, "invalid_request", "body")
    await still_works(stack)


async def test_odd_bodies_that_are_right(stack: ServiceStack) -> None:
    good = stack.body("odd")
    for raw in (
        b"\xef\xbb\xbf" + json.dumps(good).encode(),
        b'{"model": "other", ' + json.dumps(good).encode()[1:],  # the last of equal names counts
        json.dumps(good | {"seed": 10**30}).encode(),  # the engine judges its parameters
        json.dumps(good | {"x": "\N{GRINNING FACE}"}).encode(),
    ):
        assert text_of(await post(stack, raw)) == "odd"


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": None}, 400, "invalid_request", "model"),
        ({"model": 5}, 400, "invalid_request", "model"),
        ({"model": ""}, 400, "invalid_request", "model"),
        ({"model": ["a"]}, 400, "invalid_request", "model"),
        ({"model": "nobody/serves-this"}, 404, "model_not_found", "model"),
        ({"model": "a b>*\n\u2028"}, 404, "model_not_found", "model"),
        ({"messages": None}, 400, "invalid_request", "messages"),
        ({"messages": []}, 400, "invalid_request", "messages"),
        ({"messages": "hello"}, 400, "invalid_request", "messages"),
        ({"messages": ["hello"]}, 400, "invalid_request", "messages[0]"),
        ({"messages": [{"content": 5}]}, 400, "invalid_request", "messages[0].content"),
        ({"messages": [{"content": [5]}]}, 400, "invalid_request", "messages[0].content[0]"),
        ({"messages": [{"content": [{}]}]}, 400, "invalid_request", "messages[0].content[0].type"),
        ({"ec_transfer_params": {"a": 1}}, 400, "reserved_field", "ec_transfer_params"),
        ({"kv_transfer_params": {"a": 1}}, 400, "reserved_field", "kv_transfer_params"),
        ({"vllm_xargs": {"a": 1}}, 400, "reserved_field", "vllm_xargs"),
        ({"prompt_embeds": "x"}, 400, "reserved_field", "prompt_embeds"),
        ({"media_io_kwargs": {"a": 1}}, 400, "unsupported_parameter", "media_io_kwargs"),
        ({"mm_processor_kwargs": 5}, 400, "invalid_request", "mm_processor_kwargs"),
        (
            {"mm_processor_kwargs": {"patch_size": 7}},
            400,
            "unsupported_parameter",
            "mm_processor_kwargs.patch_size",
        ),
        (
            {"messages": [{"role": "user", "content": "see <|image_pad|>"}]},
            400,
            "reserved_token",
            "messages[0].content",
        ),
    ],
)
async def test_wrong_fields(
    stack: ServiceStack, fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    response = await stack.http.post(CHAT, json=stack.body("bad") | fields)
    check_error(response, status, code, param)
    await still_works(stack)


async def test_completions_without_a_prompt(stack: ServiceStack) -> None:
    response = await stack.http.post(COMPLETIONS, json={"model": stack.model})
    check_error(response, 400, "invalid_request", "prompt")
    await still_works(stack)


# -- media --------------------------------------------------------------------------------------------


def _png_of(width: int, height: int) -> bytes:
    """A picture that claims this size, and has no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", b"no pixels")
        + chunk(b"IEND", b"")
    )


def _large() -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((400, 400), 100).save(buffer, "PNG")
    assert len(buffer.getvalue()) > MAX_MEDIA
    return buffer.getvalue()


def _url(url: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    ("part", "status", "code", "field"),
    [
        ({"type": "nonsense"}, 400, "invalid_request", ".type"),
        ({"type": 7}, 400, "invalid_request", ".type"),
        ({"type": "image_url"}, 400, "invalid_request", ".image_url"),
        (_url(None), 400, "invalid_request", ".image_url.url"),
        (_url(""), 400, "invalid_request", ".image_url.url"),
        (_url("ftp://example.com/x.png"), 400, "media_url_refused", ""),
        (_url("file:///etc/passwd"), 400, "media_url_refused", ""),
        (_url("http://127.0.0.1/x.png"), 400, "media_url_refused", ""),
        (_url("https://169.254.169.254/latest"), 400, "media_url_refused", ""),
        (_url("https://[::1]/x.png"), 400, "media_url_refused", ""),
        (_url("data:image/png;base64,@@@"), 400, "invalid_data_uri", ""),
        (_url("data:image/png;base64,"), 400, "invalid_data_uri", ""),
        (_url(make_data_uri(b"no picture at all")), 415, "unsupported_media", ""),
        (broken_part(), 400, "invalid_image", ""),
        (image_part(_png_of(8, 8)), 400, "invalid_image", ""),
        (image_part(_png_of(50_000, 50_000)), 413, "too_many_pixels", ""),
        (image_part(_large()), 413, "media_too_large", ""),
        (
            {"type": "video_url", "video_url": {"url": "x"}},
            400,
            "media_url_refused",
            "",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "AA=="}},
            400,
            "modality_not_supported",
            "",
        ),
        ({"type": "input_file", "input_file": {}}, 400, "modality_not_supported", ""),
        ({"type": "image_embeds", "image_embeds": "x"}, 400, "reserved_field", ""),
        ({"type": "media_ref", "item": 0}, 400, "invalid_media_ref", ".item"),
        ({"type": "input_image", "file_id": "file-none"}, 404, "file_not_found", ""),
        ({"type": "image_file", "image_file": {"file_id": "x"}}, 404, "file_not_found", ""),
        ({"type": "image_file", "image_file": 5}, 400, "invalid_request", ".image_file"),
        ({"type": "text", "text": "x", "image": "y"}, 400, "invalid_request", ""),
    ],
)
async def test_wrong_parts(
    stack: ServiceStack, part: dict[str, Any], status: int, code: str, field: str
) -> None:
    good = picture()
    body = stack.body("bad", good)
    body["messages"][0]["content"].insert(1, part)
    before = list(stack.encoders[0].engine.encoded)
    check_error(
        await stack.http.post(CHAT, json=body), status, code, f"messages[0].content[1]{field}"
    )
    assert stack.encoders[0].engine.encoded == before  # refused before any work
    await still_works(stack)


async def test_too_many_parts(stack: ServiceStack) -> None:
    response = await stack.ask("many", *(picture() for _ in range(5)))
    check_error(response, 413, "too_many_items", "messages[0].content[4]")
    await still_works(stack)


async def test_fc13_a_uuid_of_the_client_is_no_key(stack: ServiceStack) -> None:
    one, other = picture(), picture()
    for data in (one, other):
        body = stack.body("mine", data)
        body["messages"][0]["content"][0]["uuid"] = "same"
        assert text_of(await stack.http.post(CHAT, json=body)) == answer_text("mine", data)


# -- headers and routes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "text/plain", "multipart/form-data", "application/xml"])
async def test_wrong_content_type(stack: ServiceStack, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    content = json.dumps(stack.body("typed")).encode()
    response = await stack.http.post(CHAT, content=content, headers=headers)
    check_error(response, 415, "unsupported_content_type")
    await still_works(stack)


@pytest.mark.parametrize("kind", ["Application/JSON; charset=utf-8", "application/vnd.x+json"])
async def test_content_types_of_json(stack: ServiceStack, kind: str) -> None:
    content = json.dumps(stack.body("typed")).encode()
    response = await stack.http.post(CHAT, content=content, headers={"content-type": kind})
    assert text_of(response) == "typed"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "", "1e999"])
async def test_wrong_deadline(stack: ServiceStack, value: str) -> None:
    response = await stack.http.post(
        CHAT, json=stack.body("when"), headers={"x-epd-deadline-s": value}
    )
    check_error(response, 400, "invalid_request", "x-epd-deadline-s")
    await still_works(stack)


async def test_deadline_of_the_header(stack: ServiceStack) -> None:
    pd = stack.pds[0].engine
    pd.gate.clear()
    headers = {"x-epd-deadline-s": "0.3"}
    response = await stack.http.post(CHAT, json=stack.body("late"), headers=headers)
    check_error(response, 504, "deadline_exceeded")
    assert response.json()["error"]["stage"] == "generate"
    pd.gate.set()
    await still_works(stack)


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_above_the_limit(stack: ServiceStack, chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100_000

    content: Any = pieces() if chunked else b" " * (MAX_BODY + 1)
    headers = {"content-type": "application/json"}
    response = await stack.http.post(CHAT, content=content, headers=headers)
    check_error(response, 413, "body_too_large")
    await still_works(stack)


async def test_claimed_length_above_the_limit_is_refused_unread(stack: ServiceStack) -> None:
    url = stack.http.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 99999999999\r\n\r\n{"
    )
    async with asyncio.timeout(5):
        assert b" 413 " in await reader.readline()
    writer.close()
    await still_works(stack)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_route"),
        ("POST", "/v1/embeddings", 404, "unknown_route"),
        ("POST", "/v1/chat", 404, "unknown_route"),
        ("GET", "/docs", 404, "unknown_route"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/v1/files", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/%ff%fe", 404, "unknown_route"),
    ],
)
async def test_unknown_routes_and_methods(
    stack: ServiceStack, method: str, path: str, status: int, code: str
) -> None:
    response = await stack.http.request(method, path)
    check_error(response, status, code)
    if status == 405:
        assert response.headers["allow"]
    await still_works(stack)


async def test_models(stack: ServiceStack) -> None:
    response = await stack.http.get("/v1/models")
    assert response.json()["object"] == "list"
    (card,) = [card for card in response.json()["data"] if card["id"] == stack.model]
    assert (card["object"], card["max_model_len"]) == ("model", MAX_MODEL_LEN)
    assert (await stack.http.get(f"/v1/models/{stack.model}")).json() == card
    check_error(await stack.http.get("/v1/models/none"), 404, "model_not_found", "model")


# -- files --------------------------------------------------------------------------------------------


async def upload(stack: ServiceStack, data: bytes, **fields: str) -> httpx.Response:
    return await stack.http.post(
        "/v1/files",
        files={"file": ("cat.png", data, "image/png")},
        data={"purpose": "vision"} | fields,
    )


@pytest.mark.parametrize("form", ["input_image", "image_file"])
async def test_upload_is_encoded_at_once_and_reused(stack: ServiceStack, form: str) -> None:
    data, encoder = picture(), stack.encoders[0]
    before = (await stack.counters(encoder)).get("encoded", 0)
    response = await upload(stack, data)
    assert response.status_code == 200, response.text
    file = response.json()
    assert (file["object"], file["purpose"], file["bytes"]) == ("file", "vision", len(data))
    assert file["filename"] == "cat.png"

    async def encoded() -> bool:
        return (await stack.counters(encoder)).get("encoded", 0) == before + 1

    await eventually(encoded, "the upload is encoded before anybody asks")
    part: dict[str, Any] = {"type": "input_image", "file_id": file["id"]}
    if form == "image_file":
        part = {"type": "image_file", "image_file": {"file_id": file["id"]}}
    body = stack.body("file")
    body["messages"][0]["content"].insert(0, part)
    answer = await stack.http.post(CHAT, json=body)
    assert text_of(answer) == answer_text("file", data)
    assert answer.headers["x-epd-items"] == "reused"
    assert (await stack.counters(encoder))["encoded"] == before + 1


async def test_life_of_a_file(stack: ServiceStack) -> None:
    data = picture()
    file = (await upload(stack, data)).json()
    path = f"/v1/files/{file['id']}"
    assert (await stack.http.get(path)).json() == file
    content = await stack.http.get(f"{path}/content")
    assert (content.content, content.headers["content-type"]) == (data, "image/png")
    deleted = await stack.http.delete(path)
    assert deleted.json() == {"id": file["id"], "object": "file", "deleted": True}
    for response in (
        await stack.http.get(path),
        await stack.http.get(f"{path}/content"),
        await stack.http.delete(path),
    ):
        check_error(response, 404, "file_not_found", "file_id")
    body = stack.body("gone")
    body["messages"][0]["content"].append({"type": "input_image", "file_id": file["id"]})
    response = await stack.http.post(CHAT, json=body)
    check_error(response, 404, "file_not_found", "messages[0].content[1]")
    await still_works(stack)


@pytest.mark.parametrize(
    ("request_of", "status", "code", "param"),
    [
        ({"data": {"purpose": "vision"}}, 400, "invalid_request", "file"),
        ({"data": {"purpose": "vision", "file": "text"}}, 400, "invalid_request", "file"),
        ({"data": {}}, 400, "invalid_request", "purpose"),
        ({"data": {"purpose": "batch"}}, 400, "invalid_request", "purpose"),
        ({"file": b"no picture"}, 415, "unsupported_media", "file"),
        ({"file": b""}, 415, "unsupported_media", "file"),
        ({"file": _png_of(8, 8)}, 400, "invalid_image", "file"),
        ({"file": _png_of(50_000, 50_000)}, 413, "too_many_pixels", "file"),
        ({"file": _large()}, 413, "media_too_large", "file"),
        ({"file": b"x" * 300_000}, 413, "media_too_large", "file"),
    ],
)
async def test_wrong_uploads(
    stack: ServiceStack, request_of: dict[str, Any], status: int, code: str, param: str
) -> None:
    if "file" in request_of:
        response = await upload(stack, request_of["file"])
    else:
        # A form of multipart/form-data needs a file to httpx.
        files = [(name, (None, value)) for name, value in request_of["data"].items()]
        response = await stack.http.post("/v1/files", files=files or [("x", (None, "y"))])
    check_error(response, status, code, param)
    await still_works(stack)


async def test_uploads_that_are_no_form(stack: ServiceStack) -> None:
    response = await stack.http.post("/v1/files", json={"file": "x"})
    check_error(response, 415, "unsupported_content_type")
    kind = {"content-type": "multipart/form-data; boundary=x"}
    for content in (b"junk", b"", b"--x\r\n\r\n"):
        response = await stack.http.post("/v1/files", content=content, headers=kind)
        assert response.status_code == 400
        check_error(response, 400, "invalid_request", response.json()["error"]["param"])
    no_boundary = {"content-type": "multipart/form-data"}
    response = await stack.http.post("/v1/files", content=b"junk", headers=no_boundary)
    check_error(response, 400, "invalid_request", response.json()["error"]["param"])
    await still_works(stack)


# -- health, metrics, absence ------------------------------------------------------------------------------


async def test_health_and_ready(stack: ServiceStack) -> None:
    assert (await stack.http.get("/health")).json() == {"status": "ok"}
    ready = await stack.http.get("/ready")
    assert ready.status_code == 200
    assert stack.model in ready.json()["models"]


async def test_metrics_can_be_parsed(stack: ServiceStack) -> None:
    before = _samples((await stack.http.get("/metrics")).text)
    data = picture()
    await stack.ask("counted", data)
    await stack.ask("counted", data)
    await stack.http.post(CHAT, json=stack.body("no") | {"messages": 1})
    after = _samples((await stack.http.get("/metrics")).text)

    def grown(name: str, **labels: str) -> float:
        at = (name, tuple(sorted(labels.items())))
        return after[at] - before.get(at, 0.0)

    assert grown("epd_gateway_requests_total", route=CHAT, status="200") == 2
    assert grown("epd_gateway_requests_total", route=CHAT, status="400") == 1
    assert grown("epd_gateway_items_total", origin="encoded") == 1
    assert grown("epd_gateway_items_total", origin="reused") == 1
    assert grown("epd_gateway_request_duration_seconds_count", route=CHAT) == 3
    assert grown("epd_gateway_time_to_first_token_seconds_count", route=CHAT) == 2
    assert after["epd_gateway_open_requests", ()] == 0


def _samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_fc03_a_stream_that_fails_midway_ends_with_an_error_event(
    stack: ServiceStack,
) -> None:
    data = picture()
    pd = stack.pds[0]
    pd.engine.gate.clear()
    async with stack.streaming("broken", data) as response:
        pieces = response.aiter_text()
        seen = await anext(pieces)
        (pd.arena / "pins" / pd.id / stack.key(data)).write_bytes(b"no embedding")
        pd.engine.gate.set()
        seen += "".join([piece async for piece in pieces])
    assert response.status_code == 200
    *_, event, mark, rest = seen.split("\n\n")
    assert (mark, rest) == ("data: [DONE]", "")
    error = json.loads(event.removeprefix("data: "))["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert "shorter than an embedding's header" in error["message"]
    await still_works(stack)


@pytest.mark.slow
async def test_no_workers_and_too_few(own_brokers: Brokers, tmp_path: Path) -> None:
    async with bare_stack(own_brokers.nats_url, own_brokers.redis_url, tmp_path) as stack:
        await stack.add_gateway()
        check_error(await stack.http.get("/ready"), 503, "not_ready")
        assert (await stack.http.get("/health")).status_code == 200
        assert (await stack.http.get("/v1/models")).json()["data"] == []
        _unavailable(await stack.ask("nobody"), "generate")

        pd = await stack.add_pd()
        await stack.ready()
        check_error(await stack.http.get("/ready"), 503, "not_ready")
        assert text_of(await stack.ask("text")) == "text"
        _unavailable(await stack.ask("picture", picture()), "encode")
        check_error(
            await stack.http.post(CHAT, json=stack.body("x") | {"model": "other"}),
            404,
            "model_not_found",
            "model",
        )
        assert (await upload(stack, picture())).status_code == 200  # it is only not early

        await stack.add_encoder()
        await stack.ready()
        assert (await stack.http.get("/ready")).status_code == 200
        data = picture()
        assert text_of(await stack.ask("all", data)) == answer_text("all", data)

        await pd.process.stop()
        stack.pds.clear()
        await eventually(
            lambda: not stack.registry.ready("pd", stack.model), "the PD worker is gone"
        )
        await eventually(_says(stack, 503), "the gateway knows")
        _unavailable(await stack.ask("too late"), "generate")


def _unavailable(response: httpx.Response, stage: str) -> None:
    check_error(response, 503, "unavailable")
    assert response.json()["error"]["stage"] == stage
    assert int(response.headers["retry-after"]) >= 1


def _says(stack: ServiceStack, status: int, path: str = "/ready") -> Any:
    async def says() -> bool:
        return (await stack.http.get(path)).status_code == status

    return says


@pytest.fixture(scope="module")
async def own_brokers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Brokers]:
    """Brokers that may be stopped."""
    async with embedded_brokers(tmp_path_factory.mktemp("stopped")) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("which", ["nats", "redis"])
async def test_a_broker_that_goes_and_comes_back(
    own_brokers: Brokers, tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_common.bus.connection.PUBLISH_TIMEOUT_S", 1.0)
    async with service_stack(own_brokers.nats_url, own_brokers.redis_url, tmp_path) as stack:
        broker = own_brokers.nats if which == "nats" else own_brokers.redis
        await broker.stop()
        await eventually(_says(stack, 503), "not ready")
        assert (await stack.http.get("/health")).status_code == 200
        response = await stack.ask("away", picture())
        assert response.status_code == 503
        assert response.json()["error"]["code"] in ("unavailable", f"{which}_unavailable")
        assert int(response.headers["retry-after"]) >= 1
        await broker.start()
        await eventually(_says(stack, 200), "ready again")
        data = picture()
        assert text_of(await stack.ask("back", data)) == answer_text("back", data)


async def test_gateway_drains(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    async with service_stack(nats_url, redis_url, tmp_path, encoders=0) as stack:
        pd = stack.pds[0].engine
        pd.gate.clear()
        asking = asyncio.create_task(stack.ask("finishes"))
        await eventually(lambda: bool(pd.running), "the engine has the request")
        stack.gateway.terminate()
        await eventually(
            lambda: all(
                view.record.state == "draining"
                for view in stack.registry.workers("gateway")
                if view.record.worker == stack.gateway_id
            ),
            "it drains",
        )
        pd.gate.set()
        assert text_of(await asking) == "finishes"
        await asyncio.wait_for(stack.gateway.task, 10)
        with pytest.raises(httpx.ConnectError):
            await stack.ask("closed")


def test_tag_is_short() -> None:
    assert len(tag(b"x")) == 12
