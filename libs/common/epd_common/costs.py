"""What a request costs the system, in tokens, as far as can be told before any of it is done. No I/O.

A cost is an estimate for sharing the system fairly, not a count: there is no tokenizer here. What is certain,
such as the rows of pictures whose size was seen before, is counted as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from epd_common.ingest.body import CHAT, COMPLETIONS, CONTENT_FIELDS, RESPONSES
from epd_common.ingest.contents import PROMPT_FIELDS, parts_of
from epd_common.ingest.parts import text_of
from epd_common.protocol import GenerateJob, Item

CHARACTERS_PER_TOKEN = 4
"""As is usual for English."""

ANSWER_TOKENS = 512
"""Assumed of a request that names no limit."""

PIXELS_PER_ROW = 28 * 28
"""Of the models with the finest rows that are served here (patches of 14 pixels, 2 x 2 of them a row)."""

MAX_ROWS_OF_SIZE = 16_384
"""Processors scale down what would have more."""

ROWS_UNSEEN = 1_024
"""Assumed of an item of which nothing is known yet: a picture of 800 x 1000 pixels."""

_SAMPLES = ("n", "best_of", "best_of_n")


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of a request by what is done with them.

    Attributes:
        text: To be prefilled, without those of media.
        media: Parts that show media; equal ones are counted each.
        visual: Rows of these parts, to be encoded and prefilled; None before they were looked at.
        answer: To be generated, at most.
    """

    text: int
    media: int
    visual: int | None
    answer: int


@dataclass(frozen=True, slots=True)
class Prices:
    """What a token of each kind counts."""

    text: float = 1.0
    visual: float = 2.0
    answer: float = 1.0

    def cost(self, work: Work, *, rows_unseen: float) -> int:
        """Of a request, 1 or more.

        Args:
            rows_unseen: Of a part that was not looked at.
        """
        visual = work.media * rows_unseen if work.visual is None else work.visual
        total = work.text * self.text + visual * self.visual + work.answer * self.answer
        return max(1, round(total))


def work_unseen(route: str, body: dict[str, Any], *, max_model_len: int) -> Work:
    """The work of a body whose media nobody has looked at, and which may be malformed."""
    media = sum(isinstance(part, dict) and not text_of(part) for part in parts_of(route, body))
    return _work(route, body, media, None, max_model_len)


def work_of(
    route: str,
    body: dict[str, Any],
    items: Sequence[Item],
    rows: Sequence[int | None],
    *,
    max_model_len: int,
) -> Work:
    """The work of a prepared body.

    Args:
        items: Those that the body's ``media_ref`` parts point at.
        rows: Of each item, as far as they are known.
    """
    estimates = [
        rows_by_size(item) if known is None else known
        for item, known in zip(items, rows, strict=True)
    ]
    shown = [estimates[number] for number in references(route, body)]
    return _work(route, body, len(shown), sum(shown), max_model_len)


def prompt_tokens_at_sight(job: GenerateJob) -> int:
    """About how long a job's prompt is, as its message shows without its body being read."""
    return sum(map(rows_by_size, job.items)) + len(job.body) // CHARACTERS_PER_TOKEN


def rows_by_size(item: Item) -> int:
    """Rows that an item of this size may have."""
    if not item.width or not item.height:
        return ROWS_UNSEEN
    return min(-(-item.width * item.height // PIXELS_PER_ROW), MAX_ROWS_OF_SIZE)


def references(route: str, body: dict[str, Any]) -> list[int]:
    """The items that a prepared body shows, each as often as it does."""
    return [
        part["item"]
        for part in parts_of(route, body)
        if isinstance(part, dict) and part.get("type") == "media_ref"
    ]


def _work(
    route: str, body: dict[str, Any], media: int, visual: int | None, max_model_len: int
) -> Work:
    most = max_model_len or (1 << 20)
    characters = sum(len(text_of(part)) for part in parts_of(route, body))
    text = (characters + _characters_besides(route, body)) // CHARACTERS_PER_TOKEN
    ids, prompts = _prompt(body.get("prompt")) if route == COMPLETIONS else (0, 1)
    limit = next(filter(None, (_positive(body, name) for name in _LIMITS.get(route, ()))), 0)
    endless = most if body.get("ignore_eos") is True else ANSWER_TOKENS
    each = min(max(limit or endless, _positive(body, "min_tokens")), most)
    samples = max(_positive(body, name) or 1 for name in _SAMPLES)
    # More samples than any engine runs at once are refused by it; they are no reason to overflow.
    answer = each * min(samples * prompts, most)
    # A longer prompt is refused by the engine, whatever it is made of.
    seen = None if visual is None else min(visual, most)
    return Work(min(text + ids, most), media, seen, answer)


_LIMITS = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
}
"""What bounds an answer, the field that counts first."""


def _characters_besides(route: str, body: dict[str, Any]) -> int:
    """What templates may render besides contents: tools, calls of them, a schema, arguments of one's own."""
    prompt = PROMPT_FIELDS.get(route, "")
    fields = [
        value for name, value in body.items() if name not in ("model", prompt, "stream_options")
    ]
    contents = ("role", *CONTENT_FIELDS.get(route, ()))
    entries = body.get(prompt)
    for entry in entries if isinstance(entries, list) and route in CONTENT_FIELDS else ():
        if isinstance(entry, dict):
            fields += [value for name, value in entry.items() if name not in contents]
    # Not walked, as a hostile one has millions of values.
    return sum(len(msgspec.json.encode(v)) for v in fields if isinstance(v, str | list | dict))


def _prompt(prompt: object) -> tuple[int, int]:
    """Tokens of a completion's prompts, and how many prompts these are."""
    if isinstance(prompt, str):
        return len(prompt) // CHARACTERS_PER_TOKEN, 1
    if not isinstance(prompt, list) or not prompt:
        return 0, 1
    nested = [entry for entry in prompt if isinstance(entry, str | list)]
    if not nested:
        return len(prompt), 1
    sizes = (
        len(entry) // CHARACTERS_PER_TOKEN if isinstance(entry, str) else len(entry)
        for entry in nested
    )
    return sum(sizes), len(nested)


def _positive(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    return value if type(value) is int and value > 0 else 0
