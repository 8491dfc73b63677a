"""No key, password or picture in a log or an error, whatever is asked, at the most talkative level."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from direct import Inbox, direct_job
from epd_cli.brokers import Brokers, embedded_brokers
from epd_common import worker
from epd_common.api_keys import ApiKey, hash_key
from epd_common.errors import UnavailableError
from epd_common.ingest.data_uri import make_data_uri
from epd_common.protocol import Item, Media, encode, subjects
from epd_common.telemetry.logs import configure_logging
from epd_gateway.service import serve
from epd_gateway.settings import GatewaySettings
from service_stack import CHAT, ServiceStack, bare_stack, eventually, text_of

pytestmark = pytest.mark.slow  # many brokers or processes of its own

RUN = 24
"""A longer run of a secret than chance would bring."""


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    """All that a process would log at debug level, in both forms."""
    root = logging.getLogger()
    named = [logging.getLogger(name) for name in ("httpx", "httpcore", "nats")]
    before = (root.handlers[:], root.level, [logger.level for logger in named])
    written = io.StringIO()
    handlers = []
    try:
        for form in ("json", "text"):
            configure_logging("debug", form)
            (handler,) = root.handlers
            assert isinstance(handler, logging.StreamHandler)
            handler.setStream(written)
            handlers.append(handler)
        root.handlers[:] = handlers
        yield written
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        for logger, level in zip(named, before[2], strict=True):
            logger.setLevel(level)


def noise() -> bytes:
    """A picture of noise, so that every part of it is one of a kind."""
    buffer = io.BytesIO()
    Image.frombytes("RGB", (40, 40), secrets.token_bytes(4800)).save(buffer, "PNG")
    return buffer.getvalue()


class Secrets:
    """What must not be seen, and what was said."""

    def __init__(self, logs: io.StringIO) -> None:
        self.logs = logs
        self.answers: list[str] = []
        self.words: dict[str, str] = {}

    def word(self, name: str) -> str:
        """A new secret."""
        return self.words.setdefault(name, f"secret-{name}-{secrets.token_hex(8)}")

    def picture(self, data: bytes) -> bytes:
        """Marks a picture: no long run of it, as base64 or as bytes, may be seen."""
        for name, text in (
            ("base64", base64.b64encode(data).decode()),
            ("bytes", repr(data)[2:-1]),
            ("hex", data.hex()),
        ):
            for start in range(len(text) // 8, len(text) - RUN, len(text) // 8):
                self.words[f"{name} {len(self.words)}"] = text[start : start + RUN]
        return data

    def check(self) -> None:
        said = {"logs": self.logs.getvalue(), **dict(enumerate(self.answers))}  # type: ignore[dict-item]
        for name, word in self.words.items():
            for where, text in said.items():
                assert word not in text, f"{name} in {where}"


@pytest.fixture
def hidden(logs: io.StringIO) -> Secrets:
    return Secrets(logs)


@contextlib.asynccontextmanager
async def stack_with_secrets(
    own: Brokers, folder: Path, hidden: Secrets
) -> AsyncIterator[ServiceStack]:
    for role in ("gateway", "encoder", "pd"):
        for name, url in (("nats", own.nats.url_for(role)), ("redis", own.redis.url_for(role))):
            hidden.words[f"{role}'s {name} password"] = _password(url)
    key = hidden.word("key")
    (folder / "keys").write_text(ApiKey(hash=hash_key(key.encode()), tenant="t").line() + "\n")
    async with bare_stack(own.nats_url, own.redis_url, folder, by_role=own) as stack:
        await stack.add_encoder(log_level="debug")
        await stack.add_pd(log_level="debug")
        await stack.add_gateway(log_level="debug", api_keys_file=folder / "keys")
        stack.http.headers["authorization"] = f"Bearer {key}"
        await stack.ready()
        yield stack


@pytest.fixture
async def own(tmp_path: Path, logs: io.StringIO) -> AsyncIterator[Brokers]:
    async with embedded_brokers(tmp_path / "own") as running:
        yield running


async def test_requests_right_and_wrong(
    own: Brokers, tmp_path: Path, hidden: Secrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "UNEXPECTED_DELAY_S", 0.05)
    async with stack_with_secrets(own, tmp_path, hidden) as stack:

        async def send(part: dict[str, Any], **headers: str) -> None:
            body = stack.body("text")
            body["messages"][0]["content"].insert(0, part)
            answer = await stack.http.post(CHAT, json=body, headers=headers)
            hidden.answers.append(answer.text)

        def url(text: str) -> dict[str, Any]:
            return {"type": "image_url", "image_url": {"url": text}}

        data = hidden.picture(noise())
        assert text_of(await stack.ask("right", data))
        await stack.forget(data)
        assert text_of(await stack.ask("again", data))

        uri = make_data_uri(data)
        encoded = uri.partition(",")[2]
        for part in (
            url(uri[:-40]),  # cut off
            url(uri.replace("image/png", "image/gif")),
            url(uri.replace("image/png", "text/plain")),
            url(uri.replace(";base64", "")),
            url(uri.replace(",", ";")),
            url("data:" + encoded),
            url(encoded),
            url(f"data:image/png;base64,{encoded}!{encoded}"),
            url(f"file:///{encoded}"),
            {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
            {"type": "image_url", "image_url": {"url": [uri]}},
            {"type": "image_url", "image_url": uri, "text": 1},
            {"type": "image_file", "image_file": {"file_id": encoded}},
            {"type": "no_such_type", "data": uri},
            {"type": "image_embeds", "image_embeds": encoded},
        ):
            await send(part)

        word = hidden.word("in-media-url")
        for address in (
            f"https://user:{word}@127.0.0.1/a.png",
            f"http://user:{word}@example.invalid/a.png",
            f"https://user:{word}@example.invalid/a.png?token={word}",
            f"https://example.invalid/a.png?signature={word}",
            f"ftp://user:{word}@example.invalid/",
            f"https://user:{word}@[::1/",
        ):
            await send(url(address))

        wrong = hidden.word("wrong-key")
        for value in (f"Bearer {wrong}", f"Basic {wrong}", wrong):
            await send(url(uri), authorization=value)
        hidden.answers.append(
            (await stack.http.post(CHAT, content=b'{"a": "' + data + b'"', headers=_JSON)).text
        )
        hidden.answers.append((await stack.http.get(f"/v1/nothing?key={wrong}")).text)

        engine = stack.encoders[0].engine
        other = hidden.picture(noise())
        engine.refuse = other
        hidden.answers.append((await stack.ask("no", other)).text)
        stack.pds[0].engine.crash = True
        hidden.answers.append((await stack.ask("crash", data)).text)
        stack.pds[0].engine.crash = False

        form: dict[str, Any] = {"data": {"purpose": "vision"}, "files": {"file": ("a", data[:-9])}}
        hidden.answers.append((await stack.http.post("/v1/files", **form)).text)
    hidden.check()
    assert "encoder is ready" in hidden.logs.getvalue()


_JSON = {"content-type": "application/json"}


async def test_direct_jobs_right_and_wrong(own: Brokers, tmp_path: Path, hidden: Secrets) -> None:
    async with stack_with_secrets(own, tmp_path, hidden) as stack:
        data = hidden.picture(noise())
        subject = subjects.generate_subject(stack.model, "l0")
        for items in (
            [Item(media=Media(inline=data[:-20]))],
            [Item(media=Media(inline=data), key="0")],
        ):
            inbox = await Inbox().listen(stack.bus)
            body = (
                b'{"messages": [{"role": "user", "content": [{"type": "media_ref", "item": 0}]}]}'
            )
            job = encode(direct_job(stack, inbox, items=items, body=body))
            await stack.bus.js.publish(subject, job)
            hidden.answers.append((await inbox.error()).message)
            await stack.bus.js.publish(subject, job[:-30])
        await stack.bus.js.publish(subjects.encode_subject(stack.model, "l0"), data)

        async def letters() -> bool:
            return (await stack.bus.js.stream_info("EPD_DLQ")).state.messages >= 3

        await eventually(letters, "what does not decode went to the dead letters")
    hidden.check()


async def test_brokers_that_go_away_and_come_back(
    own: Brokers, tmp_path: Path, hidden: Secrets
) -> None:
    async with stack_with_secrets(own, tmp_path, hidden) as stack:
        await own.redis.stop()
        hidden.answers.append((await stack.http.get("/ready")).text)
        answer = await stack.ask("away", hidden.picture(noise()))
        assert answer.status_code == 503
        hidden.answers.append(answer.text)
        await own.redis.start()
        await own.nats.restart()
        await eventually(lambda: _is_ready(stack), "all is well again")
    hidden.check()


async def _is_ready(stack: ServiceStack) -> bool:
    try:
        return (await stack.http.get("/ready")).status_code == 200
    except httpx.HTTPError:
        return False


async def test_brokers_that_refuse_the_password(own: Brokers, hidden: Secrets) -> None:
    for nats_url, redis_url in (
        (_wrong(own.nats_url, hidden), own.redis_url),
        (own.nats_url, _wrong(own.redis_url, hidden)),
        (f"nats://u:{hidden.word('nowhere')}@127.0.0.1:1", own.redis_url),
        (own.nats_url, f"redis://u:{hidden.word('redis-nowhere')}@127.0.0.1:1/0"),
    ):
        settings = GatewaySettings(nats_url=nats_url, redis_url=redis_url, port=0, broker_wait_s=0)
        with pytest.raises(UnavailableError) as caught:
            await serve(settings, asyncio.Event())
        hidden.answers.append(str(caught.value))
        logging.getLogger("test").error("as the process would", exc_info=caught.value)
    hidden.check()


def _wrong(url: str, hidden: Secrets) -> str:
    return url.replace(_password(url), hidden.word("wrong password"))


def _password(url: str) -> str:
    return url.partition("@")[0].rpartition(":")[2]
