"""What a simulated vLLM server does with a request: as an encoder, as a PD server, or as both on one device.

What both sides of a comparison have in common: the engines (``epd_sim``), their profile, fault plan and
clock, and the arena in which embeddings lie. Like vLLM 0.32 with its connector for files, an encoder takes
what lies there for done, and joins an encode of the same item that is under way in its own engine; it knows
of no others'.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from epd_common.decoding.pictures import CorruptError, TooManyPixelsError, decode
from epd_common.engines import AnswerHead, AnswerPart, AnswerPiece, Placeholder
from epd_common.errors import BadRequestError, EpdError, UpstreamError
from epd_common.ingest.body import CHAT
from epd_common.ingest.data_uri import parse_data_uri
from epd_common.store import Arena
from epd_sim.encoder_engine import SimEncoderEngine
from epd_sim.engine import MAX_PIXELS
from epd_sim.pd_engine import SimPdEngine
from epd_sim.profiles import Profile
from epd_sim.sizing import size_of

MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """A picture of a request, its key, and what is told of it in place of its pixels."""

    key: str
    data: bytes
    metadata: dict[str, Any]


@dataclass(slots=True)
class Encoding:
    """Brings items into the arena, each once at a time.

    Attributes:
        decodes: Each picture is decoded, as vLLM does; else its header alone is read.
        counts: ``encoded`` items, ``embedding_bytes`` that were written, ``encode_calls`` that came.
    """

    engine: SimEncoderEngine | SimPdEngine
    arena: Arena
    profile: Profile
    counts: Counter[str] = field(default_factory=Counter)
    decodes: bool = True
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def items(self, body: dict[str, Any]) -> list[Item]:
        """The pictures of a body, each fetched and decoded, as vLLM does for each request anew.

        Raises:
            BadRequestError: one cannot be decoded.
        """
        found = []
        for place, part in enumerate(parts_of(body, "image_url")):
            url = part["image_url"]["url"]
            data = parse_data_uri(url, max_bytes=MAX_BYTES, place=f"image {place}").data
            metadata = await asyncio.to_thread(self._look, data)
            key = part.get("uuid") or hashlib.sha256(data).hexdigest()
            found.append(Item(key, data, metadata))
        return found

    def _look(self, data: bytes) -> dict[str, Any]:
        try:
            if self.decodes:
                decode(data, MAX_PIXELS)
        except (CorruptError, TooManyPixelsError) as error:
            raise BadRequestError(f"cannot load the picture: {error}") from error
        profile = self.profile
        return size_of("image", data, {}, patch=profile.patch, max_rows=profile.max_rows).metadata

    async def encode(self, item: Item) -> None:
        """Return when the item's embedding is in the arena."""
        self.counts["encode_calls"] += 1
        if self.arena.touch(item.key):
            return
        if item.key not in self._running:
            task = asyncio.create_task(self._encode(item), name=f"encode {item.key[:8]}")
            self._running[item.key] = task
            task.add_done_callback(lambda _: self._running.pop(item.key))
        # Who goes away leaves the encode to the others, as an engine's step goes on, too.
        await asyncio.shield(self._running[item.key])

    async def encode_all(self, items: list[Item]) -> None:
        """Encode items, in as few batches as the engine can."""
        await asyncio.gather(*map(self.encode, items))

    async def _encode(self, item: Item) -> None:
        async def on_sized(metadata: dict[str, Any]) -> None:
            pass

        staged = await self.engine.encode(item.key, item.data, "image", {}, on_sized)
        try:
            await asyncio.to_thread(self.arena.adopt, staged.path, staged.header)
        finally:
            staged.path.unlink(missing_ok=True)
        self.counts["encoded"] += 1
        self.counts["embedding_bytes"] += staged.header.payload_bytes


def parts_of(body: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    """The content parts of one type, in their order."""
    for message in body["messages"]:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") == kind:
                yield part


@dataclass(slots=True)
class EncoderRole:
    """Answers what the proxy asks of an encoder: keys and grids, once the embeddings are there."""

    encoding: Encoding
    model: str

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer without tokens, whose ``ec_transfer_params`` tell of the items by key."""
        items = await self.encoding.items(body)
        await self.encoding.encode_all(items)
        told: dict[str, dict[str, Any]] = {}
        for index, item in enumerate(items):
            entry = told.setdefault(item.key, {"item_indices": [], "metadata": item.metadata})
            entry["item_indices"].append(index)
        return {
            "object": "chat.completion",
            "model": self.model,
            "choices": [],
            "usage": None,
            "ec_transfer_params": told or None,
        }


@dataclass(slots=True)
class PdRole:
    """Answers chats whose pictures are references to embeddings in the arena.

    Args:
        encoding: Encodes pictures on the same device, where the server does both.
    """

    engine: SimPdEngine
    arena: Arena
    encoding: Encoding | None = None
    _users: Counter[str] = field(default_factory=Counter)

    async def answer(
        self, request_id: str, body: dict[str, Any]
    ) -> AsyncGenerator[AnswerPart, None]:
        """The engine's answer.

        Raises:
            UpstreamError: an embedding is not there; vLLM's answer to that is 500.
            BadRequestError: there are pictures, and no tower to encode them.
        """
        async with contextlib.AsyncExitStack() as stack:
            if self.encoding is not None:
                items = await self.encoding.items(body)
                await self.encoding.encode_all(items)
                placeholders = [Placeholder(item.key, "image", item.metadata) for item in items]
            elif any(parts_of(body, "image_url")):
                raise BadRequestError("this server encodes no pictures; the proxy sends references")
            else:
                placeholders = [
                    Placeholder(part["uuid"], "image", part["image_embeds"])
                    for part in parts_of(body, "image_embeds")
                ]
            for placeholder in placeholders:
                self._pin(placeholder.key, stack)
            parts = self.engine.answer(request_id, CHAT, with_references(body), placeholders)
            async for part in await stack.enter_async_context(contextlib.aclosing(parts)):
                yield part

    def _pin(self, key: str, stack: contextlib.AsyncExitStack) -> None:
        if self.arena.pin(key) is None:
            raise UpstreamError(f"the embedding {key} could not be loaded", stage="generate")
        self._users[key] += 1
        stack.callback(self._unpin, key)

    def _unpin(self, key: str) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.arena.unpin(key)


def with_references(body: dict[str, Any]) -> dict[str, Any]:
    """The body with a reference in the place of each picture, as the engine takes it."""
    numbers = iter(range(1 << 30))

    def reference(part: Any) -> Any:
        if isinstance(part, dict) and part.get("type") in ("image_url", "image_embeds"):
            return {"type": "media_ref", "item": next(numbers)}
        return part

    messages = []
    for message in body["messages"]:
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": [reference(part) for part in content]}
        messages.append(message)
    return {**body, "messages": messages}


async def first_part(
    parts: AsyncGenerator[AnswerPart, None],
) -> tuple[AnswerHead, AsyncIterator[bytes]]:
    """The head of an answer, and its body's pieces."""
    head = await anext(parts)
    assert isinstance(head, AnswerHead)

    async def pieces() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(parts):
            async for part in parts:
                assert isinstance(part, AnswerPiece)
                yield part.data

    return head, pieces()


def status_of(error: EpdError) -> int:
    """The status that vLLM would answer: it knows 400 and 500."""
    return 400 if error.status < 500 else 500
