"""Reserved tokens: no text of a client may hold one.

A picture's placeholder typed as text would make the engine expect a picture that nobody sent; a chat
token would end one message and begin another. Everything a chat template can render is searched, text
that is put together from several parts too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from epd_common.errors import BadRequestError
from epd_common.ingest.body import COMPLETIONS
from epd_common.ingest.parts import text_of

_RENDERED = (
    "messages",
    "tools",
    "functions",
    "documents",
    "chat_template_kwargs",
    "response_format",
    "instructions",
    "input",
    "text",
    "previous_input_messages",
)
_RAW = ("prompt", "suffix")
_NAME_LENGTH = 64
_MEDIA_WORD = re.compile(r"image|img|vision|video|audio|media|pict", re.IGNORECASE)


def check_reserved(
    route: str, body: dict[str, Any], tokens: Sequence[str], ids: Sequence[int] = ()
) -> None:
    """Refuse a body, its media parts already replaced, that types a reserved token as text.

    A raw prompt of ``/v1/completions`` may hold chat tokens, for it is the template's work done by the
    client; it may not hold the tokens that stand for media, as text or as ids.

    Args:
        ids: Of the tokens, in the same order.

    Raises:
        BadRequestError: ``reserved_token``; ``param`` names the place.
    """
    names = _RAW if route == COMPLETIONS else _RENDERED
    if route == COMPLETIONS:
        _check_ids(
            body.get("prompt"),
            {number: token for token, number in zip(tokens, ids, strict=False) if _of_media(token)},
        )
        tokens = [token for token in tokens if _of_media(token)]
    tokens = [token for token in tokens if token]
    for name in names:
        for place, text in _texts(body.get(name), name):
            for token in tokens:
                if token in text:
                    raise BadRequestError(
                        f"{place} holds {token!r}, a token that is reserved for the model's own "
                        "use; leave it out, or write it another way",
                        code="reserved_token",
                        param=place,
                        stage="ingest",
                    )


def _of_media(token: str) -> bool:
    return _MEDIA_WORD.search(token) is not None


def _check_ids(prompt: object, reserved: dict[int, str]) -> None:
    """Look at every number of a prompt. vLLM takes ``7.0`` for 7, and ``"7"`` where no text can be: beside
    numbers, and in a list within the list."""
    waiting: list[tuple[str, object]] = [("prompt", prompt)]
    while waiting:
        place, value = waiting.pop()
        if not isinstance(value, list):
            continue
        ids = place != "prompt" or any(isinstance(entry, int | float) for entry in value)
        for n, entry in enumerate(value):
            if isinstance(entry, list):
                waiting.append((f"{place}[{n}]", entry))
            if isinstance(entry, str) and ids:
                entry = _number(entry)
            if isinstance(entry, int | float) and entry in reserved:
                raise BadRequestError(
                    f"{place}[{n}] is the id of {reserved[int(entry)]!r}, a token that stands for media, "
                    "which come as parts of a chat; leave it out",
                    code="reserved_token",
                    param=f"{place}[{n}]",
                    stage="ingest",
                )


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def _texts(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Every string in a JSON value with its place, in the order of the request; keys are strings too."""
    waiting: list[tuple[str, object]] = [(place, value)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, str):
            yield place, value
        elif isinstance(value, list):
            # Templates write the texts of one message without anything between them.
            waiting.append((place, "".join(map(text_of, value))))
            waiting.extend(
                (f"{place}[{n}]", value[n])
                for n in reversed(range(len(value)))
                if isinstance(value[n], str | list | dict)
            )
        elif isinstance(value, dict):
            waiting.extend((place, name) for name in value)
            for name, child in reversed(value.items()):
                where = f"{place}.{name[:_NAME_LENGTH]}"
                if name == "arguments" and isinstance(child, str):
                    waiting.append((where, _parsed(child)))
                waiting.append((where, child))


def _parsed(arguments: str) -> object:
    """What vLLM makes of a tool call's arguments, where escapes (``\\u003c``) are gone."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None
