"""Engines without a model: the encoder writes a digest of the picture, PD answers with the digests it finds.

So an embedding that is swapped, stale or missing shows as a wrong answer or an error.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from epd_common.beginnings import Beginning
from epd_common.engines import (
    AnswerHead,
    AnswerPiece,
    EngineInfo,
    OnSized,
    Placeholder,
    Progress,
    StagedEmbedding,
    Told,
)
from epd_common.errors import BadRequestError, UpstreamError
from epd_common.ingest.body import RESPONSES
from epd_common.ingest.contents import parts_of
from epd_common.ingest.parts import text_of
from epd_common.kept import Kept
from epd_common.store import Arena
from epd_common.store.arena import map_embedding
from epd_common.store.embedding import EmbeddingHeader, pack_header, payload_checksum

ROWS, WIDTH = 4, 8
SPECIAL_TOKENS = ("<|image_pad|>", "<|im_start|>")
MAX_MODEL_LEN = 4096
RAW = ("video",)
"""Modalities for which PD must have the media."""


def tag(data: bytes) -> str:
    """What an answer shows of a picture."""
    return hashlib.sha256(data).hexdigest()[:12]


def payload(data: bytes) -> bytes:
    """The embedding of a picture: ``ROWS`` x ``WIDTH`` float16 values that nobody computes with."""
    return hashlib.sha256(data).digest() * (ROWS * WIDTH * 2 // 32)


def header(key: str, data: bytes, fingerprint: str, modality: str = "image") -> EmbeddingHeader:
    return EmbeddingHeader(
        key=key,
        rows=ROWS,
        width=WIDTH,
        dtype="float16",
        fingerprint=fingerprint,
        metadata={} if modality in RAW else {"image_grid_thw": [1, 4, 4]},
        checksum=payload_checksum(payload(data)),
    )


def answer_text(text: str, *pictures: bytes) -> str:
    """The right answer to a request with these pictures before its text."""
    return " ".join([*(tag(data) for data in pictures), text])


def engine_info(model: str, fingerprint: str, *, encodes: bool = True) -> EngineInfo:
    """What the engines here say of themselves."""
    return EngineInfo(
        model=model,
        fingerprint=fingerprint,
        modalities=("image", "video"),
        raw_modalities=RAW,
        max_model_len=MAX_MODEL_LEN,
        special_tokens=SPECIAL_TOKENS,
        encodes=encodes,
        width=WIDTH,
        dtype="float16",
        versions={"fake": "1"},
    )


class FakeEncoderEngine:
    """Switches: ``gate`` holds every encode while it is clear; ``failures`` fails so many encodes with an
    ``UpstreamError``; ``refuse`` is a picture that cannot be encoded; ``deadly`` one that ends the engine;
    ``die`` ends it."""

    def __init__(self, model: str, fingerprint: str, staging: Path) -> None:
        self._info = engine_info(model, fingerprint)
        self._staging = staging
        self._numbers = itertools.count()
        self._dead = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures = 0
        self.sizes = True
        self.refuse: bytes | None = None
        self.deadly: bytes | None = None
        self.encoded: list[str] = []
        """Keys whose encode began."""
        self.in_tower: list[bytes] = []
        """Pictures that were prepared and then let in."""
        self.inside = self.most_inside = 0
        """Encodes that run now, and at most at once."""

    @property
    def alive(self) -> bool:
        return not self._dead.is_set()

    @property
    def steps(self) -> int:
        return 0

    @property
    def owes(self) -> bool:
        return False

    @property
    def batches(self) -> dict[int, int]:
        return {1: len(self.encoded)}

    def die(self) -> None:
        self._dead.set()
        self.gate.set()

    async def start(self, progress: Progress) -> EngineInfo:
        progress("loading nothing")
        return self._info

    async def encode(
        self,
        key: str,
        data: bytes,
        modality: str,
        processor_args: dict[str, Any],
        on_sized: OnSized,
    ) -> StagedEmbedding:
        self.encoded.append(key)
        self.inside += 1
        self.most_inside = max(self.inside, self.most_inside)
        try:
            return await self._encode(key, data, modality, on_sized)
        finally:
            self.inside -= 1

    async def _encode(
        self, key: str, data: bytes, modality: str, on_sized: OnSized
    ) -> StagedEmbedding:
        sized = header(key, data, self._info.fingerprint, modality).metadata
        await on_sized(sized if self.sizes else {})
        self.in_tower.append(data)
        await self.gate.wait()
        if data == self.deadly:
            self.die()
        if not self.alive:
            raise UpstreamError("the fake encoder is dead", stage="encode", key=key)
        if data == self.refuse:
            raise BadRequestError("no vision tower takes this", code="cannot_encode", key=key)
        if self.failures:
            self.failures -= 1
            raise UpstreamError("the fake encoder fails", stage="encode", key=key)
        head = header(key, data, self._info.fingerprint, modality)
        path = self._staging / f"{next(self._numbers)}-{key}"
        path.write_bytes(pack_header(head) + payload(data))
        return StagedEmbedding(path, head)

    async def stop(self) -> None:
        self._dead.set()


class FakePdEngine:
    """Answers with the tags of the pinned embeddings in the order of the parts, and the texts.

    Switches: ``tower`` encodes, if it was told to; ``gate`` holds answers between their first piece and the
    rest while it is clear; ``status`` makes every answer an error of that status; ``padding`` is put behind
    every answer; ``refuses`` are metadata that it makes no prompt of; ``crash`` raises something that no
    engine should; ``die`` ends the engine. Its ``kept`` is what a test says.
    """

    def __init__(self, model: str, fingerprint: str, arena: Arena, *, encodes: bool) -> None:
        self._info = engine_info(model, fingerprint, encodes=encodes)
        self._pins = arena.pins
        self.tower = FakeEncoderEngine(model, fingerprint, arena.staging)
        self._dead = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self._woken = asyncio.Event()
        self.status = 200
        self.refuses: dict[str, Any] | None = None
        self.padding = ""
        self.crash = False
        self.kept = Kept()
        self.running: set[str] = set()
        self.begun: list[str] = []
        self.closed: list[str] = []
        """Requests whose generator was closed before its end."""

    @property
    def alive(self) -> bool:
        return not self._dead.is_set()

    @property
    def steps(self) -> int:
        return 0

    @property
    def owes(self) -> bool:
        return False

    @property
    def batches(self) -> dict[int, int]:
        return self.tower.batches

    def die(self) -> None:
        self._dead.set()
        self.gate.set()
        self._woken.set()
        self.tower.die()

    async def start(self, progress: Progress) -> EngineInfo:
        progress("loading nothing")
        return self._info

    async def encode(self, *args: Any) -> StagedEmbedding:
        assert self._info.encodes
        return await self.tower.encode(*args)

    async def answer(
        self,
        request_id: str,
        route: str,
        body: dict[str, Any],
        placeholders: list[Placeholder],
        told: Told | None = None,
        *,
        beginnings: Sequence[Beginning] = (),
        traceparent: str = "",
    ) -> AsyncGenerator[AnswerHead | AnswerPiece, None]:
        self.begun.append(request_id)
        self.running.add(request_id)
        done = False
        try:
            if self.crash:
                raise RuntimeError("the fake engine has a bug")
            if self.status != 200:
                error = {"error": {"message": "the engine refuses", "code": "engine_says_no"}}
                yield AnswerHead(self.status, "application/json")
                yield AnswerPiece(json.dumps(error).encode())
                done = True
                return
            if any(item.metadata == self.refuses for item in placeholders):
                yield AnswerHead(400, "application/json")
                yield AnswerPiece(b'{"error": {"message": "no such prompt"}}')
                done = True
                return
            await self._prefill(placeholders)
            if body.get("stream"):
                async for piece in self._stream(route, body, placeholders):
                    yield piece
            else:
                await self._hold()
                yield AnswerHead(200, "application/json")
                yield AnswerPiece(
                    _whole(route, self._words(route, body, placeholders), body["model"])
                )
            done = True
        finally:
            self.running.discard(request_id)
            if not done:
                self.closed.append(request_id)

    async def _stream(
        self, route: str, body: dict[str, Any], placeholders: list[Placeholder]
    ) -> AsyncGenerator[AnswerHead | AnswerPiece, None]:
        yield AnswerHead(200, "text/event-stream; charset=utf-8")
        if route == RESPONSES:
            yield _numbered("response.created", 0)
            await self._hold()
            for number, word in enumerate(self._words(route, body, placeholders)):
                yield _numbered("response.output_text.delta", number + 1, (number,), delta=word)
            yield _numbered("response.completed", number + 2)
            return
        yield _event({"object": "chat.completion.chunk", "choices": [{"delta": {"content": ""}}]})
        await self._hold()
        for number, word in enumerate(self._words(route, body, placeholders)):
            yield _event({"choices": [{"delta": {"content": word}}]}, (number,))
        yield AnswerPiece(b"data: [DONE]\n\n")

    async def _hold(self) -> None:
        await self.gate.wait()
        if not self.alive:
            raise UpstreamError("the fake engine died", stage="generate")

    def _words(
        self, route: str, body: dict[str, Any], placeholders: list[Placeholder]
    ) -> list[str]:
        """Read late, when all was held: an embedding that went away meanwhile is missed."""
        parts: list[Any] = [body.get("prompt"), *parts_of(route, body)]
        words: list[str] = []
        for part in parts:
            if isinstance(part, dict) and part["type"] == "media_ref":
                words.append(self._tag(placeholders[part["item"]]) + " ")
            else:
                words.append(text_of(part))
        return [*words, self.padding]

    async def _prefill(self, placeholders: list[Placeholder]) -> None:
        """Wait for the pins, as a gated engine does, before the first piece of an answer."""
        for expected in placeholders:
            while not (self._pins / expected.key).exists():
                self._woken.clear()
                await self._woken.wait()
                if not self.alive:
                    raise UpstreamError("the fake engine died", stage="generate")

    def _tag(self, expected: Placeholder) -> str:
        path = self._pins / expected.key
        found = map_embedding(path)
        if found is None:
            raise UpstreamError(f"embedding {expected.key} is not pinned", stage="generate")
        found.verify()
        if found.header.key != expected.key or found.header.metadata != expected.metadata:
            raise UpstreamError(f"embedding {expected.key} is another one", stage="generate")
        if (
            expected.modality in RAW
            and tag(expected.media or b"") != bytes(found.payload[:6]).hex()
        ):
            raise UpstreamError(f"the media of {expected.key} are others", stage="generate")
        return bytes(found.payload[:6]).hex()

    async def wake(self) -> None:
        self._woken.set()

    async def stop(self) -> None:
        self._dead.set()


def _whole(route: str, words: list[str], model: str) -> bytes:
    text = "".join(words)
    if route == RESPONSES:
        content = [{"type": "output_text", "text": text}]
        output = [{"type": "message", "role": "assistant", "content": content}]
        return json.dumps({"object": "response", "model": model, "output": output}).encode()
    choice = {"text": text} if route == "/v1/completions" else {"message": {"content": text}}
    return json.dumps({"object": "answer", "model": model, "choices": [choice]}).encode()


def _numbered(kind: str, number: int, tokens: tuple[int, ...] = (), **fields: Any) -> AnswerPiece:
    event = json.dumps({"type": kind, "sequence_number": number, **fields})
    return AnswerPiece(f"event: {kind}\ndata: {event}\n\n".encode(), tokens)


def _event(chunk: dict[str, Any], tokens: tuple[int, ...] = ()) -> AnswerPiece:
    return AnswerPiece(f"data: {json.dumps(chunk)}\n\n".encode(), tokens)
