"""`data:` URIs in every spelling that clients use, and the ones that must be refused."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest

from epd_common.errors import BadRequestError, TooLargeError
from epd_common.ingest.data_uri import is_data_uri, parse_data_uri

DATA = bytes(range(256)) + b"\xfb\xff\xfe"  # Its base64 has '+', '/' and '='.
BASE64 = base64.b64encode(DATA).decode()
PLACE = "messages[0].content[1]"


@pytest.mark.parametrize(
    ("uri", "content_type"),
    [
        (f"data:image/png;base64,{BASE64}", "image/png"),
        (f"DATA:IMAGE/PNG;BASE64,{BASE64}", "image/png"),
        (f"  data:image/png;base64,{BASE64}\n", "image/png"),
        (f"data:image/png;charset=utf-8;name=a.png;base64,{BASE64}", "image/png"),
        (f"data: image/png ; base64 ,{BASE64}", "image/png"),
        (f"data:;base64,{BASE64}", ""),
        (f"data:image/png;base64,{BASE64[:76]}\r\n{BASE64[76:]}\n", "image/png"),
        (f"data:image/png;base64, {BASE64[:9]}\t{BASE64[9:]}", "image/png"),
        (f"data:image/png;base64,{quote(BASE64, safe='')}", "image/png"),
        (f"data:image/png;base64,{base64.urlsafe_b64encode(DATA).decode()}", "image/png"),
        (f"data:image/png;base64,{BASE64.rstrip('=')}", "image/png"),
        (f"data:image/png,{quote(DATA, safe='')}", "image/png"),
        (f"data:,{quote(DATA)}", ""),
    ],
)
def test_is_read(uri: str, content_type: str) -> None:
    assert is_data_uri(uri)
    found = parse_data_uri(uri, max_bytes=len(DATA), place=PLACE)
    assert found.data == DATA
    assert found.content_type == content_type


@pytest.mark.parametrize(
    "uri",
    [
        "data:image/png;base64",
        "data:",
        "data:image/png;base64,",
        "data:image/png;base64,====",
        "data:image/png;base64,A",
        "data:image/png;base64,AAAAA",
        "data:image/png;base64,AA=A",
        "data:image/png;base64,AA!A",
        "data:image/png;base64,AAé=",
        "data:image/png;base64,AA%3",
        "data:image/png;base64,AA%zz",
        "data:image/png,%",
        "data:image/png,",
    ],
)
def test_malformed(uri: str) -> None:
    with pytest.raises(BadRequestError, match="cannot be read") as caught:
        parse_data_uri(uri, max_bytes=100, place=PLACE)
    assert caught.value.code == "invalid_data_uri"
    assert caught.value.param == PLACE


@pytest.mark.parametrize(
    "uri",
    [
        f"data:image/png;base64,{BASE64}",
        f"data:image/png;base64,{quote(BASE64, safe='')}",
        f"data:image/png,{quote(DATA, safe='')}",
        "data:image/png;base64,"
        + "!" * 400,  # Too large comes before malformed: nothing is decoded.
    ],
)
def test_too_large(uri: str) -> None:
    with pytest.raises(TooLargeError) as caught:
        parse_data_uri(uri, max_bytes=len(DATA) - 1, place=PLACE)
    assert (caught.value.status, caught.value.code) == (413, "media_too_large")
    assert caught.value.param == PLACE


@pytest.mark.parametrize("url", ["https://example.com/data:", "dat:", "", "database:x"])
def test_other_urls_are_none(url: str) -> None:
    assert not is_data_uri(url)
