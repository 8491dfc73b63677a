"""Requests as the bytes of OpenAI chat bodies: assembled, not encoded, as a picture's long part is ready."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Mapping
from typing import Any

from epd_bench.pictures import PictureMaker
from epd_bench.workloads import Request, Turn

BYTES_PER_TOKEN = 4
_POOL_BYTES = 1 << 18


class BodyMaker:
    """Writes the bodies of one run.

    Args:
        seed: Texts and pictures of other seeds are others.
        fields: More fields of each body, e.g. ``temperature``.
    """

    def __init__(self, model: str, seed: int, fields: Mapping[str, Any]) -> None:
        self.pictures = PictureMaker(seed)
        self._seed = seed
        self._begin = b'{"model":' + json.dumps(model).encode() + b',"messages":['
        given = {"stream": True, "stream_options": {"include_usage": True}, **fields}
        self._end = json.dumps(given, separators=(",", ":")).encode()[1:]
        rng = random.Random(f"text-{seed}")
        words = ["".join(rng.choices(string.ascii_lowercase, k=3)) for _ in range(2000)]
        self._pool = " ".join(rng.choices(words, k=_POOL_BYTES // BYTES_PER_TOKEN)).encode()

    def body(self, request: Request) -> bytes:
        """The body of a request; its text begins with what no other request has."""
        pieces = [self._begin]
        for number, turn in enumerate(request.turns):
            pieces.append(b"," if number else b"")
            self._turn(turn, pieces)
        pieces += (b'],"max_tokens":', str(request.output_tokens).encode(), b",", self._end)
        return b"".join(pieces)

    def _turn(self, turn: Turn, pieces: list[bytes]) -> None:
        text = b'"' + self._text(turn) + b'"'
        pieces += (b'{"role":"', turn.role.encode(), b'","content":')
        if not turn.pictures:
            pieces += (text, b"}")
            return
        pieces.append(b"[")
        for picture in turn.pictures:
            head, tail = self.pictures.uri(picture)
            pieces += (b'{"type":"image_url","image_url":{"url":"', head, tail, b'"}},')
        pieces += (b'{"type":"text","text":', text, b"}]}")

    def _text(self, turn: Turn) -> bytes:
        size = turn.text_tokens * BYTES_PER_TOKEN
        name = f"{turn.text_seed}.{self._seed} "
        begin = random.Random(name).randrange(len(self._pool))
        text = name.encode() + self._pool[begin : begin + size]
        while len(text) < size:
            text += self._pool[: size - len(text)]
        return text[: max(size, len(name))]
