"""Items whose room in the prompt only the engine can tell, from the media: PD brings them to it."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from direct import Inbox, direct_job, publish
from epd_common.ingest.data_uri import make_data_uri
from epd_common.protocol import Item, Media
from epd_common.protocol.codec import encode
from epd_common.protocol.keys import digest, embedding_key
from fake_engine import answer_text
from service_stack import CHAT, ServiceStack, image_part, picture, service_stack, text_of


@pytest.fixture
async def stack(nats_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[ServiceStack]:
    async with service_stack(nats_url, redis_url, tmp_path) as running:
        yield running


def clip() -> bytes:
    return b"\x00\x00\x00\x18ftypisom" + secrets.token_bytes(16)


def video(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": make_data_uri(data, "video/mp4")}}


def body(stack: ServiceStack, *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "model": stack.model,
        "messages": [{"role": "user", "content": list(parts)}],
        **fields,
    }


async def test_media_that_only_the_engine_can_size_reach_it(stack: ServiceStack) -> None:
    data, one = clip(), picture()
    asked = body(stack, video(data), image_part(one), {"type": "text", "text": "both"})
    for _ in range(2):  # encoded, then reused
        response = await stack.http.post(CHAT, json=asked)
        assert text_of(response) == answer_text("both", data, one)
    assert len(stack.encoders[0].engine.encoded) == 2


async def test_such_media_take_no_processor_arguments(stack: ServiceStack) -> None:
    asked = body(stack, video(clip()), mm_processor_kwargs={"max_pixels": 9})
    response = await stack.http.post(CHAT, json=asked)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "mm_processor_kwargs"


async def test_such_media_that_are_gone_end_the_request(stack: ServiceStack) -> None:
    data = clip()
    key = embedding_key(media_digest=digest(data), fingerprint=stack.fingerprint, modality="video")
    item = Item(modality="video", media=Media(ref=digest(data)), key=key, digest=digest(data))
    inbox = await Inbox().listen(stack.bus)
    raw = json.dumps(body(stack, {"type": "media_ref", "item": 0})).encode()
    await publish(stack, "generate", encode(direct_job(stack, inbox, body=raw, items=[item])))
    frame = await inbox.error()
    assert (frame.status, frame.code, frame.key) == (503, "media_gone", key)
