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
CONTENT_FIELDS = {CHAT: ("content",), RESPONSES: ("content", "output")}
"""The fields of a chat's message, or of an item of a response's input, that may hold parts."""

_NEEDS_STATE = ("previous_response_id", "conversation", "background")
MAX_PARTS = 4096
"""Messages and content parts of one request, together."""

MAX_PROMPTS = 128
"""Of one completion; each is a request of its own to the engine, made at once in a worker's event loop."""

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
        _walk_all(route, "messages", found)
    elif route == RESPONSES:
        _check_stateless(body)
        if not isinstance(body.get("input"), str):
            _walk_all(route, "input", found)
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
    cuts = "truncation" if route == RESPONSES else "truncate_prompt_tokens"
    if found.parts and body.get(cuts) not in (None, "disabled"):
        raise invalid(
            cuts,
            f"{cuts} could cut a picture in two; leave it out where there are pictures",
            "unsupported_parameter",
        )
    return found


def _walk_all(route: str, name: str, found: Extracted) -> None:
    """Take the media out of all messages, or items of an input."""
    fields = CONTENT_FIELDS[route]
    entries = _list_of_objects(found.body.get(name), name)
    _check_count(entries, fields, name)
    found.body[name] = [
        _walk(entry, fields, f"{name}[{n}]", found) for n, entry in enumerate(entries)
    ]


def _check_stateless(body: dict[str, Any]) -> None:
    """Refuse what only the worker could answer that had an earlier request, and leave out what is null.

    To OpenAI's API null is the default; to vLLM ``"truncation": null`` is a prompt that may be cut, and
    ``"background": null`` a type that its own answer does not have.
    """
    for name in [name for name, value in body.items() if value is None]:
        del body[name]
    for name in _NEEDS_STATE:
        if name in body and body[name] is not False:
            raise invalid(
                name,
                f"{name} needs an answer that was kept, and none is kept here, as each request may go to "
                "another worker; send the conversation in input",
                "unsupported_parameter",
            )
    entries = body.get("input")
    for n, entry in enumerate(entries if isinstance(entries, list) else ()):
        if isinstance(entry, dict) and entry.get("type") == "item_reference":
            raise invalid(
                f"input[{n}]",
                f"input[{n}] refers to an item that was kept, and none is kept here; send the item itself",
                "unsupported_parameter",
            )


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


def _check_count(messages: list[dict[str, Any]], fields: tuple[str, ...], param: str) -> None:
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
            param=param,
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
