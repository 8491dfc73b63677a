"""A Python client that needs no gateway: it publishes jobs itself and reads the reply frames.

    async with connect(nats_url, redis_url) as client:
        answer = await client.chat("What is in image #1?", images=[png_bytes])
        print(answer.text)

The same jobs in any other language: see ``docs/protocol.md``.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats.js.errors

from epd_common.bus import Bus, Registry, announce
from epd_common.errors import EpdError, UnavailableError, from_status
from epd_common.ingest import Ingest, IngestLimits, PictureChecker
from epd_common.ingest.data_uri import make_data_uri
from epd_common.login import NatsLogin
from epd_common.orders import Orders
from epd_common.protocol import WorkerRecord, subjects
from epd_common.replies import ReplyHub
from epd_common.requester import ItemOrigin, Requester
from epd_common.store import KeyStates, MediaStore, SizeTables, open_redis

HEARTBEAT_S = 2.0
CHAT = "/v1/chat/completions"
ENCODE_LEASE_S = 60.0
TTL_S = 900
SERVED_WITHIN_S = 3.0
"""A new client waits so long for a worker to show; their heartbeats are 2 s apart."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: vLLM's OpenAI body, and what became of each distinct picture."""

    body: dict[str, Any]
    origins: list[ItemOrigin]
    ttft_s: float

    @property
    def text(self) -> str:
        """The text of the first choice, or of a response's messages."""
        if "output" in self.body:
            parts = [part for item in self.body["output"] for part in item.get("content") or ()]
            return "".join(part.get("text", "") for part in parts if part["type"] == "output_text")
        return str(self.body["choices"][0]["message"]["content"])


class Client:
    """Sends requests over NATS. Made by :func:`connect`."""

    def __init__(self, registry: Registry, requester: Requester) -> None:
        self._registry = registry
        self._requester = requester

    def models(self) -> list[str]:
        """Models that are served now."""
        return self._registry.models()

    async def chat(
        self,
        text: str,
        *,
        images: Sequence[bytes] = (),
        model: str = "",
        timeout_s: float = 120.0,
        **options: Any,
    ) -> Answer:
        """Ask one question about some pictures.

        Args:
            images: Bytes of picture files, which stand before the text.
            model: May be left out where one model is served.
            options: More fields of the OpenAI body, e.g. ``max_tokens``.

        Raises:
            EpdError: as the gateway would answer.
        """
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": make_data_uri(image)}} for image in images
        ]
        parts.append({"type": "text", "text": text})
        body = {"messages": [{"role": "user", "content": parts}], **options}
        return await self.complete(CHAT, body | {"model": model or self._only_model()}, timeout_s)

    async def complete(self, route: str, body: dict[str, Any], timeout_s: float = 120.0) -> Answer:
        """Send an OpenAI body and wait for the whole answer."""
        started = time.monotonic()
        async with self._requester.send(route, body, timeout_s=timeout_s) as sent:
            head = await sent.reply.head()
            ttft_s = time.monotonic() - started
            raw = b"".join([piece async for piece in sent.reply.data()])
        answer = json.loads(raw)
        if head.status != 200:
            raise _engine_error(head.status, answer)
        return Answer(answer, sent.origins, ttft_s)

    @contextlib.asynccontextmanager
    async def stream(
        self, route: str, body: dict[str, Any], timeout_s: float = 120.0
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Send a body with ``stream: true``; the chunks as vLLM's OpenAI application makes them."""
        streaming = body | {"stream": True}
        async with self._requester.send(route, streaming, timeout_s=timeout_s) as sent:
            head = await sent.reply.head()
            if head.status != 200:
                raw = b"".join([piece async for piece in sent.reply.data()])
                raise _engine_error(head.status, json.loads(raw))
            yield _events(sent.reply.data())

    def _only_model(self) -> str:
        models = self.models()
        if len(models) != 1:
            raise UnavailableError(
                f"name a model: {', '.join(models) or 'none'} served now", retry_after_s=5.0
            )
        return models[0]


@contextlib.asynccontextmanager
async def connect(
    nats_url: str,
    redis_url: str,
    *,
    login: NatsLogin = NatsLogin(),  # noqa: B008 - it is frozen
    redis_ca: Path | None = None,
    redis_password_file: Path | None = None,
    inbox: str = "_INBOX",
) -> AsyncIterator[Client]:
    """Connect to the brokers, with the rights of an operator, as it orders encodes itself.

    Args:
        login: What NATS asks for beside the URL.
        redis_ca: Certificates (PEM) that Valkey's may be signed by, for a ``rediss://`` URL.
        redis_password_file: File with Valkey's password, for a URL that has none.
        inbox: What the subjects begin with on which answers come.

    Raises:
        UnavailableError: one of them does not answer.
    """
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(
            Bus(nats_url, name="epd-client", login=login, inbox=inbox)
        )
        redis = await stack.enter_async_context(
            open_redis(redis_url, ca=redis_ca, password_file=redis_password_file)
        )
        limits = IngestLimits()
        media = MediaStore(redis, ttl_s=TTL_S)
        pictures = await stack.enter_async_context(PictureChecker(limits))
        registry = await stack.enter_async_context(Registry(bus))
        await registry.until_served(SERVED_WITHIN_S)
        name = await _announced(stack, bus)
        hub = await stack.enter_async_context(ReplyHub(bus, name=name))
        states = KeyStates(redis, lease_s=ENCODE_LEASE_S, ready_ttl_s=TTL_S)
        yield Client(
            registry,
            Requester(
                registry=registry,
                ingest=Ingest(media, pictures, limits, files=media),
                orders=Orders(bus, states, media),
                hub=hub,
                sizes=SizeTables(redis),
                name=name,
            ),
        )


async def _announced(stack: AsyncExitStack, bus: Bus) -> str:
    """Enter the registry, so that workers end the requests of a client that dies; the key of the record."""
    worker = secrets.token_hex(6)

    def record(beat: int) -> WorkerRecord:
        return WorkerRecord(
            role="client",
            worker=worker,
            node=socket.gethostname(),
            state="ready",
            beat=beat,
            ttl_s=3 * HEARTBEAT_S,
            pid=os.getpid(),
        )

    try:
        await stack.enter_async_context(announce(bus, record, every_s=HEARTBEAT_S))
    except nats.js.errors.BucketNotFoundError:
        return ""  # no service has ever run here: there is nobody to tell
    return subjects.worker_key("client", worker)


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event, whatever pieces they come in."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                event: dict[str, Any] = json.loads(line[6:])
                yield event


def _engine_error(status: int, body: dict[str, Any]) -> EpdError:
    error = body.get("error") or {}
    return from_status(
        status,
        str(error.get("message", body)),
        code=str(error.get("code") or error.get("type") or ""),
        param=error.get("param"),
        stage="generate",
    )
