"""A request's prompts: what is said, what is shown, and how many tokens that takes.

There is no tokenizer: four bytes of text are a token, as is usual for English, and a message costs what
Qwen's chat template adds to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epd_common.ingest.parts import read_part, text_of

BYTES_PER_TOKEN = 4
MESSAGE_TOKENS = 5
"""Begin, role, newline, end, newline."""

OPENING_TOKENS = 3
"""Begin, role and newline of the answer."""

ITEM_TOKENS = 2
"""Begin and end of an item, around its rows."""


@dataclass(frozen=True, slots=True)
class Text:
    """Text of a prompt; ``extra`` tokens besides those of the text itself."""

    text: str
    extra: int = 0

    @property
    def tokens(self) -> int:
        return -(-len(self.text.encode()) // BYTES_PER_TOKEN) + self.extra


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A content part with media, as it stands in the body."""

    part: dict[str, Any]


Prompt = list[Text | MediaPart]


def chat_prompt(messages: list[dict[str, Any]]) -> Prompt:
    """The prompt of a chat."""
    prompt = [piece for message in messages for piece in _message(message.get("content"))]
    return [*prompt, Text("", OPENING_TOKENS)]


def responses_prompt(body: dict[str, Any]) -> Prompt:
    """The prompt of a response: its instructions, and its input or the items of that."""
    prompt: Prompt = []
    if instructions := body.get("instructions"):
        prompt += _message(instructions)
    items = body["input"]
    for item in [{"content": items}] if isinstance(items, str) else items:
        prompt += _message(item.get("content"))
        if "output" in item:
            prompt += _message(item["output"])
        calls = (item.get("name"), item.get("arguments"))
        prompt += [Text(text) for text in calls if isinstance(text, str)]
    return [*prompt, Text("", OPENING_TOKENS)]


def _message(content: object) -> Prompt:
    # The role is text of the template, and counted with it.
    message: Prompt = [Text("", MESSAGE_TOKENS)]
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict) and read_part(part, "content") is not None:
            message.append(MediaPart(part))
        else:
            message.append(Text(text_of(part)))
    return message


def completion_prompts(prompt: object) -> list[Prompt]:
    """The prompts of a completion: one text or list of token ids, or a list of them.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(prompt, str):
        return [[Text(prompt)]]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("prompt must be a string, a list of token ids, or a list of these")
    if all(type(token) is int for token in prompt):
        return [_ids(prompt)]
    return [completed for one in prompt for completed in completion_prompts(one)]


def _ids(ids: list[int]) -> Prompt:
    text = " ".join(map(str, ids))
    return [Text(text, len(ids) - Text(text).tokens)]
