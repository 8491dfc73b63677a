"""Walks an OpenAI body: finds its media parts and puts references in their place.

Every list of content parts that vLLM would read is walked, in whatever message it stands. Fields that vLLM
checks itself (temperature, tools, ...) are left to vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from epd_common.errors import TooLargeError
from epd_common.ingest.parts import ItemSource, Source, invalid, read_part
from epd_common.ingest.processor_args import check_processor_args
from epd_common.protocol.jobs import Item, Modality

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"

_INTERNAL_FIELDS = ("ec_transfer_params", "kv_transfer_params", "vllm_xargs")
MAX_PARTS = 4096
MAX_PROMPTS = 128
"""Of one completion; each is a request of its own to the engine, made at once in a worker's event loop."""

"""Messages and content parts of one request, together."""

_MAX_DEPTH = 100
"""Levels of lists and objects. JSON writers further on use recursion, and JSON schemas need some thirty."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A media part that was found.

    ``modality`` is None for a reference to an item. ``reference`` is the very object that stands in the new
    body in place of the part; whoever loads the part sets its ``item``.
    """

    place: str
    modality: Modality | None
    source: Source
    reference: dict[str, Any]

    def modality_in(self, items: Sequence[Item]) -> Modality:
        """The part's modality; that of a reference is its item's."""
        if isinstance(self.source, ItemSource):
            return items[self.source.index].modality
        assert self.modality is not None
        return self.modality


@dataclass(slots=True)
class Extracted:
    """A copy of the body without media, and the media parts in the order of the request."""

    body: dict[str, Any]
    processor_args: dict[str, Any]
    parts: list[MediaPart] = field(default_factory=list)


def parse_body(raw: bytes) -> dict[str, Any]:
    """A body from its bytes, which must be strict JSON: what follows writes it anew for the next stage,
    and a lone surrogate, ``NaN`` or ``Infinity`` could not be written.

    Raises:
        BadRequestError: ``invalid_json``.
    """
    try:
        body = msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # The parser calls half of a surrogate pair truncated.
        hint = (
            " (or an escape \\uD800 to \\uDFFF without its pair)" if rb"\ud" in raw.lower() else ""
        )
        raise invalid(
            "body", f"the body is not valid JSON: {error}{hint}", "invalid_json"
        ) from error
    if not isinstance(body, dict):
        raise invalid("body", "the body must be a JSON object", "invalid_json")
    return body


def extract(route: str, body: dict[str, Any], *, max_items: int) -> Extracted:
    """Take the media parts, and ``mm_processor_kwargs``, out of a body. ``body`` itself stays as it is.

    Raises:
        BadRequestError: A wrong JSON type on the way, a field that the stages use among themselves, or
            a part that cannot be served; ``param`` names it.
        TooLargeError: ``too_many_items`` or ``too_many_parts``.
    """
    if not isinstance(body, dict):
        raise invalid("body", "the request body must be a JSON object")
    _check_depth(body)
    _check_fields(body)
    body = dict(body)
    found = Extracted(body, _take_processor_args(body))
    if route == CHAT:
        messages = _list_of_objects(body.get("messages"), "messages")
        _check_count(messages, ("content",))
        body["messages"] = [
            _walk(message, ("content",), f"messages[{n}]", found)
            for n, message in enumerate(messages)
        ]
    elif route == RESPONSES:
        if not isinstance(body.get("input"), str):
            items = _list_of_objects(body.get("input"), "input")
            _check_count(items, ("content", "output"))
            body["input"] = [
                _walk(item, ("content", "output"), f"input[{n}]", found)
                for n, item in enumerate(items)
            ]
    elif route == COMPLETIONS:
        if not isinstance(body.get("prompt"), str | list):
            raise invalid("prompt", "prompt must be a string or a list")
        prompts = body["prompt"]
        several = isinstance(prompts, list) and any(isinstance(one, str | list) for one in prompts)
        if several and len(prompts) > MAX_PROMPTS:
            raise invalid("prompt", f"{len(prompts)} prompts; {MAX_PROMPTS} are taken at once")
    else:
        raise invalid("route", f"the route {route!r} is not one that carries requests to a model")
    if len(found.parts) > max_items:
        raise TooLargeError(
            f"the request has {len(found.parts)} media parts; at most {max_items} are allowed",
            code="too_many_items",
            param=found.parts[max_items].place,
            stage="ingest",
        )
    if found.parts and body.get("truncate_prompt_tokens") is not None:
        raise invalid(
            "truncate_prompt_tokens",
            "truncate_prompt_tokens could cut a picture in two; leave it out where there are pictures",
            "unsupported_parameter",
        )
    return found


def _check_depth(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise invalid("body", f"the body is nested deeper than {_MAX_DEPTH} levels")


def _check_count(messages: list[dict[str, Any]], fields: tuple[str, ...]) -> None:
    """Bound what templates and validation run over: they hold the event loop of a PD worker."""
    parts = sum(
        len(content)
        for message in messages
        for name in fields
        if isinstance(content := message.get(name), list)
    )
    if len(messages) + parts > MAX_PARTS:
        raise TooLargeError(
            f"the request has {len(messages)} messages with {parts} content parts; at most "
            f"{MAX_PARTS} of both are taken",
            code="too_many_parts",
            param="messages",
            stage="ingest",
        )


def _check_fields(body: dict[str, Any]) -> None:
    for name, value in body.items():
        if value is None:
            continue
        if name in _INTERNAL_FIELDS or name.endswith("_embeds"):
            raise invalid(
                name,
                f"{name} is a field that the stages use among themselves; leave it out",
                "reserved_field",
            )
    if body.get("media_io_kwargs"):
        # Encoders decode once for all requests; ignoring it would show the model another picture.
        raise invalid(
            "media_io_kwargs",
            "media_io_kwargs cannot be set per request here; leave it out",
            "unsupported_parameter",
        )


def _take_processor_args(body: dict[str, Any]) -> dict[str, Any]:
    name = "mm_processor_kwargs"
    args = body.pop(name, None)
    if args is None:
        return {}
    if not isinstance(args, dict):
        raise invalid(name, f"{name} must be a JSON object")
    check_processor_args(args, name)
    return args


def _list_of_objects(value: object, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise invalid(place, f"{place} must be a list that is not empty")
    for n, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise invalid(f"{place}[{n}]", f"{place}[{n}] must be an object")
    return value


def _walk(
    message: dict[str, Any], fields: tuple[str, ...], place: str, found: Extracted
) -> dict[str, Any]:
    """A copy of the message whose lists of content parts hold references for media."""
    message = dict(message)
    for name in fields:
        content = message.get(name)
        if isinstance(content, list):
            message[name] = [
                _walk_part(part, f"{place}.{name}[{n}]", found) for n, part in enumerate(content)
            ]
        elif not isinstance(content, str | None):
            where = f"{place}.{name}"
            raise invalid(where, f"{where} must be a string or a list of content parts")
    return message


def _walk_part(part: object, place: str, found: Extracted) -> object:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise invalid(place, f"{place} must be an object with a type")
    media = read_part(part, place)
    if media is None:
        # A uuid would make vLLM look for media in a part of any type.
        return {name: value for name, value in part.items() if name != "uuid"}
    reference: dict[str, Any] = {"type": "media_ref", "item": -1}
    found.parts.append(MediaPart(place, *media, reference))
    return reference
