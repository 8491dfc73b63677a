"""What a service expects of an engine. Implementations: ``epd_vllm`` (real vLLM), ``epd_sim`` (simulated)."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from epd_common.beginnings import Beginning
from epd_common.errors import UpstreamError
from epd_common.kept import Kept
from epd_common.store.embedding import EmbeddingHeader, IntegrityError

Progress = Callable[[str], None]
"""Is told what an engine does while it starts, in a few words."""


OnSized = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a loaded engine is.

    ``fingerprint`` is part of every embedding key: two engines share embeddings exactly if they have the
    same one. ``special_tokens`` are the tokenizer's reserved tokens as text, ``special_token_ids`` their ids
    in the same order. ``raw_modalities`` are those of ``modalities`` for which a PD engine must be given the
    media beside the embedding. ``encodes`` says whether it can turn media into embeddings. ``width`` and
    ``dtype`` are those of their rows; ``max_item_rows`` is what a PD engine's encoder cache holds, or 0.
    ``merge`` are the patches along each edge of what becomes a row of a picture or video, or 0 where that is
    not so simple.
    """

    model: str
    fingerprint: str
    modalities: tuple[str, ...]
    max_model_len: int
    special_tokens: tuple[str, ...]
    special_token_ids: tuple[int, ...] = ()
    max_item_rows: int = 0
    raw_modalities: tuple[str, ...] = ()
    encodes: bool = True
    width: int = 0
    dtype: str = ""
    merge: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    def check_rows(self, header: EmbeddingHeader) -> None:
        """Compare an embedding's rows with those for which a prompt has room, by its metadata.

        Raises:
            IntegrityError: they are others. An engine would refuse it each time.
        """
        room = self._room(header.metadata)
        if room is not None and header.rows != room:
            raise IntegrityError(
                f"embedding {header.key} has {header.rows} rows, and {header.metadata} have room for {room}",
                key=header.key,
            )

    def _room(self, metadata: dict[str, Any]) -> int | None:
        """Rows that a prompt has room for; None where that cannot be told."""
        tokens = metadata.get("audio_num_tokens")
        if isinstance(tokens, int):
            return tokens
        for name in ("image_grid_thw", "video_grid_thw"):
            grid = metadata.get(name)
            if self.merge and is_grid(grid):
                return int(math.prod(grid)) // self.merge**2
        return None


def is_grid(value: object) -> TypeGuard[list[int]]:
    """Whether this has the shape of a grid: patches in time, down and across."""
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(isinstance(number, int) for number in value)
    )


@dataclass(frozen=True, slots=True)
class StagedEmbedding:
    """An embedding that an encoder engine wrote to a file of the arena's staging folder.

    The header is complete and the payload verified, but nothing is published yet.
    """

    path: Path
    header: EmbeddingHeader


@dataclass(frozen=True, slots=True)
class Placeholder:
    """What a PD engine must know of an item before its embedding is there.

    ``metadata`` sizes its place in the prompt, e.g. ``{"image_grid_thw": [1, 8, 8]}``; for a raw modality
    that is done by ``media``, the item's bytes, which the engine does not encode all the same.
    """

    key: str
    modality: str
    metadata: dict[str, Any]
    media: bytes | None = None


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Status and content type of an engine's answer; its body follows."""

    status: int
    content_type: str


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of the body of an engine's answer.

    In a stream, ``tokens`` are the ids of the tokens that were generated for it, and ``finish`` says why
    they are the last ones (``stop``, ``length``).
    """

    data: bytes
    tokens: tuple[int, ...] = ()
    finish: str = ""


@dataclass(frozen=True, slots=True)
class Told:
    """What the client of a stream was told by a worker that is no more.

    Attributes:
        tokens: Those of each piece of the answer, which may be none.
        finish: Why they are the last ones; empty if more are to come.
    """

    tokens: tuple[tuple[int, ...], ...]
    finish: str = ""


@dataclass(frozen=True, slots=True)
class KvHandle:
    """Where the keys and values of a prompt are, for another engine of the same kind.

    ``params`` are the engine's own; they can be sent in a message.
    """

    params: dict[str, Any]


@dataclass(slots=True)
class Loaded:
    """What an engine found of a prompt that was handed over: how many of its tokens it did not compute."""

    loaded_tokens: int = 0


AnswerPart = AnswerHead | AnswerPiece | KvHandle


class KvLostError(UpstreamError):
    """The keys and values of a handle cannot be had; nothing was answered."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="kv_lost", stage="generate")


class EncoderEngine(Protocol):
    """Turns media into embeddings."""

    @property
    def alive(self) -> bool:
        """False once the engine cannot work any more."""

    @property
    def steps(self) -> int:
        """Grows whenever the engine has computed something."""

    @property
    def owes(self) -> bool:
        """Whether it has something to compute now: it is not idle, nor does it only wait for embeddings."""

    @property
    def batches(self) -> Mapping[int, int]:
        """How often its towers took how many items at once."""

    async def start(self, progress: Progress) -> EngineInfo: ...

    async def encode(
        self,
        key: str,
        data: bytes,
        modality: str,
        processor_args: dict[str, Any],
        on_sized: OnSized,
    ) -> StagedEmbedding:
        """Encode one item; calls that run at the same time share batches.

        Args:
            on_sized: Is awaited when the item is prepared, with its metadata as far as they are known, which
                may be not at all. It may take its time; the model runs once it has returned.

        Raises:
            epd_common.errors.BadRequestError: these bytes can never be encoded.
            epd_common.errors.UpstreamError: the engine failed this time.
        """

    async def stop(self) -> None: ...


class PdEngine(EncoderEngine, Protocol):
    """Answers OpenAI requests whose media are embeddings, pinned on this node now or while it prefills.

    It can encode, too, where its info says so.
    """

    @property
    def kept(self) -> Kept:
        """The beginnings of prompts that its prefix cache holds, as far as it tells: those it was told of."""

    def answer(
        self,
        request_id: str,
        route: str,
        body: dict[str, Any],
        placeholders: list[Placeholder],
        told: Told | None = None,
        *,
        beginnings: Sequence[Beginning] = (),
        traceparent: str = "",
        hand_over: bool = False,
        kv: KvHandle | None = None,
        loaded: Loaded | None = None,
    ) -> AsyncGenerator[AnswerPart, None]:
        """An :class:`AnswerHead`, then the body in pieces. Closing the generator aborts the request.

        The head comes with the first piece, so a request that fails before has a status of its own.

        Args:
            body: Every media part is ``{"type": "media_ref", "item": N}``.
            placeholders: Of item N. Where its embedding is not pinned yet, the engine prefills up to it.
            told: The engine makes these pieces again, from their tokens, and goes on from there.
            beginnings: Those of the prompt that ``kept`` shall tell of.
            traceparent: Of the span to which the engine's own belong, where it traces.
            hand_over: Only the prompt is prefilled: there comes a :class:`KvHandle` and nothing else, or the
                whole of an error's answer.
            kv: What another engine has prefilled of this prompt, which is loaded; no embedding need be there.
            loaded: Is filled in, with ``kv``.

        Raises:
            KvLostError: ``kv`` cannot be had.
            epd_common.errors.BadRequestError: ``told`` cannot be of this request.
        """

    async def wake(self) -> None:
        """An embedding was pinned that a request inside the engine may wait for."""
