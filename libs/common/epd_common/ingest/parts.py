"""One content part of a message: text that stays, media that is read, or something to refuse.

Only known part types pass, and no key of a media part inside a text part: chat templates look at keys too
(``'image' in part``), and would place a picture's token where no picture is; vLLM itself looks at keys once
a part has a ``uuid``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epd_common.errors import BadRequestError
from epd_common.protocol.jobs import Modality


@dataclass(frozen=True, slots=True)
class UrlSource:
    """An ``http(s):`` URL or a ``data:`` URI."""

    url: str


@dataclass(frozen=True, slots=True)
class FileSource:
    """The id of an uploaded file."""

    file_id: str


@dataclass(frozen=True, slots=True)
class ItemSource:
    """A place in the items that came with a direct job."""

    index: int


Source = UrlSource | FileSource | ItemSource
_Reader = Callable[[dict[str, Any], str], Source]


def invalid(place: str, message: str, code: str | None = None) -> BadRequestError:
    return BadRequestError(message, code=code, param=place, stage="ingest")


def text_of(part: object) -> str:
    """The text that a template renders for this part, if any."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        return ""
    text = part.get(TEXT_FIELDS.get(kind, ""))
    return text if isinstance(text, str) else ""


def read_part(part: dict[str, Any], place: str) -> tuple[Modality | None, Source] | None:
    """Modality and source of a part's media; ``None`` for a part without media.

    The modality of a reference to an item is that of the item, so it is ``None`` here.

    Raises:
        BadRequestError: A part of unknown type, with wrong fields, or of a kind not served.
    """
    kind = part.get("type")
    if not isinstance(kind, str):
        raise invalid(f"{place}.type", f"{place}.type must name the part's type, as a string")
    for name in (kind, *part):
        if name.endswith("_embeds"):
            raise invalid(
                place,
                f"{place} holds {name!r}, which the stages use among themselves; "
                "send the media instead",
                "reserved_field",
            )
    if kind in _READERS:
        modality, reader = _READERS[kind]
        return modality, reader(part, place)
    if kind in _NOT_SERVED:
        raise invalid(
            place,
            f"{place} is of type {kind!r}, and {_NOT_SERVED[kind]} input is not served here",
            "modality_not_supported",
        )
    if kind not in TEXT_FIELDS:
        raise invalid(
            f"{place}.type",
            f"{place} is of the unknown type {kind!r}; known are "
            f"{', '.join(sorted({*_READERS, *TEXT_FIELDS} - {'media_ref'}))}",
        )
    _check_text(part, kind, place)
    return None


def _check_text(part: dict[str, Any], kind: str, place: str) -> None:
    name = TEXT_FIELDS[kind]
    if not isinstance(part.get(name), str | None):
        raise invalid(f"{place}.{name}", f"{place}.{name} must be a string")
    stray = _MEDIA_KEYS.intersection(part)
    if stray:
        names = ", ".join(sorted(stray))
        raise invalid(place, f"{place} is of type {kind!r} but has {names}; use a part for each")


def _url_reader(kind: str) -> _Reader:
    """Reads ``{kind: URL}`` and ``{kind: {"url": URL}}``."""

    def read(part: dict[str, Any], place: str) -> Source:
        value = part.get(kind)
        place = f"{place}.{kind}"
        if isinstance(value, dict):
            value = value.get("url")
            place = f"{place}.url"
        return UrlSource(_string(value, place))

    return read


_image_url = _url_reader("image_url")


def _input_audio(part: dict[str, Any], place: str) -> Source:
    value = part.get("input_audio")
    place = f"{place}.input_audio"
    if not isinstance(value, dict):
        raise invalid(place, f'{place} must be {{"data": BASE64, "format": "wav"}}')
    data = _string(value.get("data"), f"{place}.data")
    if data.lstrip()[:5].lower() == "data:":  # a whole data URI is a common mistake, and clear
        return UrlSource(data)
    # Whatever format is claimed, the bytes decide.
    return UrlSource(f"data:audio/*;base64,{data}")


def _input_image(part: dict[str, Any], place: str) -> Source:
    if part.get("file_id") is None:
        return _image_url(part, place)
    if part.get("image_url") is not None:
        raise invalid(place, f"{place} has both image_url and file_id; send one of them")
    return FileSource(_string(part["file_id"], f"{place}.file_id"))


def _image_file(part: dict[str, Any], place: str) -> Source:
    value = part.get("image_file")
    if not isinstance(value, dict):
        raise invalid(f"{place}.image_file", f'{place}.image_file must be {{"file_id": ID}}')
    return FileSource(_string(value.get("file_id"), f"{place}.image_file.file_id"))


def _media_ref(part: dict[str, Any], place: str) -> Source:
    index = part.get("item")
    if type(index) is not int:
        raise invalid(f"{place}.item", f"{place}.item must be the number of an item")
    return ItemSource(index)


def _string(value: object, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise invalid(place, f"{place} must be a string that is not empty")
    return value


_READERS: dict[str, tuple[Modality | None, _Reader]] = {
    "image_url": ("image", _image_url),
    "input_image": ("image", _input_image),
    "image_file": ("image", _image_file),
    "video_url": ("video", _url_reader("video_url")),
    "audio_url": ("audio", _url_reader("audio_url")),
    "input_audio": ("audio", _input_audio),
    "media_ref": (None, _media_ref),  # its item says
}

_NOT_SERVED: dict[str, str] = {
    "input_video": "input_video",
    "input_file": "file",
    "file": "file",
}

TEXT_FIELDS: dict[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}
"""Part types without media, and the field of each that is shown to the model."""

_MEDIA_KEYS = frozenset({*_READERS, *_NOT_SERVED, "image", "image_pil", "video", "audio"})
