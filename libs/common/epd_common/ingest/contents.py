"""Where the text and media of a body stand: in a chat's messages, or in the items of a response's input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from epd_common.ingest.body import CHAT, COMPLETIONS, CONTENT_FIELDS, RESPONSES

PROMPT_FIELDS = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}
"""The field of each route's body that makes most of the prompt."""


def contents_of(route: str, body: dict[str, Any]) -> Iterator[object]:
    """The contents of a body, in the order of the prompt: strings, lists of parts, None.

    The body may be malformed: whatever stands in their place is given as it is. Prompts of completions have
    no parts and are none of this; neither are a response's ``instructions``.
    """
    entries = body.get(PROMPT_FIELDS[route]) if route in CONTENT_FIELDS else None
    if isinstance(entries, str):
        yield entries
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            for name in CONTENT_FIELDS[route]:
                yield entry.get(name)


def parts_of(route: str, body: dict[str, Any]) -> Iterator[object]:
    """The parts of these contents; one that is no list is itself a part."""
    for content in contents_of(route, body):
        if isinstance(content, list):
            yield from content
        else:
            yield content
