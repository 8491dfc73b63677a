"""Videos and sound are known by their first bytes, whatever they are called."""

from __future__ import annotations

import pytest

from epd_common.errors import EpdError
from epd_common.ingest.recordings import check_recording
from epd_common.protocol.jobs import Modality

LIMIT = 1000
FILES: dict[str, tuple[Modality, bytes]] = {
    "video/mp4": ("video", b"\x00\x00\x00\x20ftypisom" + bytes(20)),
    "video/webm": ("video", b"\x1aE\xdf\xa3" + bytes(20)),
    "video/x-msvideo": ("video", b"RIFF\n\x00\x00\x00AVI LIST" + bytes(20)),
    "video/mpeg": ("video", b"\x00\x00\x01\xba" + bytes(20)),
    "audio/wav": ("audio", b"RIFF\n\x00\x00\x00WAVEfmt " + bytes(20)),
    "audio/flac": ("audio", b"fLaC" + bytes(20)),
    "audio/ogg": ("audio", b"OggS" + bytes(20)),
    "audio/mpeg": ("audio", b"ID3\x04" + bytes(20)),
    "audio/aac": ("audio", b"\xff\xf1\x50\x80" + bytes(20)),
    "audio/mp4": ("audio", b"\x00\x00\x00\x20ftypM4A " + bytes(20)),
    "audio/webm": ("audio", b"\x1aE\xdf\xa3" + bytes(20)),
}


@pytest.mark.parametrize("content_type", FILES)
@pytest.mark.parametrize("declared", ["", "application/octet-stream", "video/quicktime; a=b"])
def test_known_files(content_type: str, declared: str) -> None:
    modality, data = FILES[content_type]
    found = check_recording(data, modality, declared=declared, max_bytes=LIMIT, place="p")
    assert found == content_type


def test_mp3_without_a_tag() -> None:
    assert check_recording(b"\xff\xfb\x90\x00", "audio", max_bytes=LIMIT, place="p") == "audio/mpeg"


@pytest.mark.parametrize(
    ("data", "modality", "declared"),
    [
        (b"", "video", ""),
        (b"\x89PNG\r\n\x1a\n", "video", "video/mp4"),
        (FILES["audio/wav"][1], "video", ""),
        (FILES["video/x-msvideo"][1], "audio", ""),
        (FILES["video/mp4"][1], "video", "text/html"),
        (b"\xff\xd8\xff\xe0", "audio", ""),  # a JPEG
        (b"\xff\xff\xff\xff", "audio", ""),
    ],
)
def test_what_is_refused(data: bytes, modality: Modality, declared: str) -> None:
    with pytest.raises(EpdError) as caught:
        check_recording(data, modality, declared=declared, max_bytes=LIMIT, place="messages[0]")
    assert (caught.value.status, caught.value.param) == (415, "messages[0]")


def test_too_large() -> None:
    data = FILES["video/mp4"][1]
    check_recording(data, "video", max_bytes=len(data), place="p")
    with pytest.raises(EpdError) as caught:
        check_recording(data, "video", max_bytes=len(data) - 1, place="p")
    assert (caught.value.status, caught.value.code) == (413, "media_too_large")
