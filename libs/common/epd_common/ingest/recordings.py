"""Videos and sound recordings: their type from their first bytes.

They are decoded by the encoder alone, with the libraries that vLLM uses and under its limits; one that cannot
be decoded fails there, and its request with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from epd_common.errors import UnsupportedMediaError
from epd_common.ingest.limits import media_too_large
from epd_common.ingest.pictures import NO_STATEMENT
from epd_common.protocol.jobs import Modality


@dataclass(frozen=True, slots=True)
class _Container:
    content_type: str
    magic: re.Pattern[bytes]


def _container(content_type: str, magic: bytes) -> _Container:
    return _Container(content_type, re.compile(magic, re.DOTALL))


_KNOWN: dict[Modality, tuple[_Container, ...]] = {
    "video": (
        _container("video/mp4", rb".{4}ftyp"),
        _container("video/webm", rb"\x1aE\xdf\xa3"),
        _container("video/x-msvideo", rb"RIFF.{4}AVI "),
        _container("video/mpeg", rb"\x00\x00\x01[\xb3\xba]"),
    ),
    "audio": (
        _container("audio/wav", rb"(?:RIFF|RF64).{4}WAVE"),
        _container("audio/flac", rb"fLaC"),
        _container("audio/ogg", rb"OggS"),
        _container("audio/mpeg", rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xfb]"),
        _container("audio/aac", rb"\xff[\xf0\xf1\xf8\xf9]"),
        _container("audio/mp4", rb".{4}ftyp"),
        _container("audio/webm", rb"\x1aE\xdf\xa3"),
    ),
}
# What senders call such files, beside the modality's own types.
_CLAIMS = ("application/ogg", "application/mp4")


def check_recording(
    data: bytes, modality: Modality, *, declared: str = "", max_bytes: int, place: str
) -> str:
    """The content type of a video or a sound recording.

    Args:
        declared: The type that the data URI or the HTTP answer claims, parameters allowed.
        place: Where it stands in the request, for errors.

    Raises:
        TooLargeError: ``media_too_large``.
        UnsupportedMediaError: of a type that is not read here.
    """
    if len(data) > max_bytes:
        raise media_too_large(place, max_bytes, len(data))
    claim = declared.partition(";")[0].strip().lower()
    # A recording in a container for videos may well be declared as one.
    if claim in (*NO_STATEMENT, *_CLAIMS) or claim.startswith(("video/", "audio/")):
        for container in _KNOWN[modality]:
            if container.magic.match(data):
                return container.content_type
        found = "its bytes are none of them"
    else:
        found = f"it is declared as {claim[:100]!r}"
    known = ", ".join(container.content_type for container in _KNOWN[modality])
    raise UnsupportedMediaError(
        f"the media at {place} are not {modality} of a supported type ({known}): {found}",
        param=place,
        stage="ingest",
    )
