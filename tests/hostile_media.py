"""Pictures and recordings that somebody might send to break a decoder, made from a seed."""

from __future__ import annotations

import base64
import io
import random
import struct
import wave
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from PIL import Image

from epd_common.ingest.data_uri import make_data_uri

SEED = 4
MAX_PIXELS = 16_000_000
"""Of the gateway that they are sent to."""

NOISE = Image.effect_noise((60, 40), 90).convert("RGB")


@dataclass(frozen=True, slots=True)
class Hostile:
    """One of them.

    Attributes:
        url: As a client sends it.
        data: Its bytes, where it is a picture that must be answered.
    """

    name: str
    url: str
    data: bytes | None = None


def saved(kind: str, image: Image.Image = NOISE, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes, checksum: int = 0) -> bytes:
    right = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", right ^ checksum)


def png(width: int, height: int, pixels: bytes | None = None, *more: bytes) -> bytes:
    """A grey PNG of this size; ``more`` are chunks before its pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    if pixels is None:
        pixels = zlib.compress(b"\0" * ((width + 1) * height), 9)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head)
    return start + b"".join(more) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def scanned(times: int, edge: int = 64) -> bytes:
    """A progressive JPEG whose last scan comes so many times more; all decoders take it."""
    whole = saved("JPEG", Image.new("RGB", (edge, edge), (9, 9, 9)), progressive=True)
    at = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[at:-2] * times + whole[-2:]


def files() -> dict[str, bytes]:
    """Whole pictures of every type."""
    frames = [Image.effect_noise((30, 20), 90).convert("RGB") for _ in range(4)]
    animated: dict[str, Any] = {"save_all": True, "append_images": frames[1:]}
    return {
        "png": saved("PNG"),
        "jpeg": saved("JPEG"),
        "jpeg progressive": saved("JPEG", progressive=True),
        "webp": saved("WEBP"),
        "webp lossless": saved("WEBP", lossless=True),
        "gif": saved("GIF"),
        "bmp": saved("BMP"),
        "tiff": saved("TIFF"),
        "tiff lzw": saved("TIFF", compression="tiff_lzw"),
        "gif animated": saved("GIF", frames[0], **animated),
        "webp animated": saved("WEBP", frames[0], **animated),
        "png animated": saved("PNG", frames[0], **animated),
    }


def valid() -> Iterator[tuple[str, bytes]]:
    """Odd pictures, all of them right."""
    yield from files().items()
    for mode in ("1", "L", "LA", "P", "RGBA", "I;16"):
        yield f"png of mode {mode}", saved("PNG", Image.new(mode, (50, 30)))
    for mode in ("1", "L", "P", "RGBA", "CMYK", "I;16", "I", "F", "LAB", "YCbCr"):
        yield f"tiff of mode {mode}", saved("TIFF", Image.new(mode, (50, 30)))
    yield "jpeg of four colours", saved("JPEG", Image.new("CMYK", (50, 30)))
    yield (
        "gif of many frames",
        saved(
            "GIF",
            Image.new("P", (20, 20)),
            save_all=True,
            append_images=[Image.new("P", (20, 20), n % 255) for n in range(1, 400)],
        ),
    )
    yield "bomb below the limit", saved("PNG", Image.new("RGBA", (4000, 4000)))
    for number, blob in enumerate((b"", b"\xff" * 60_000, b"II*\0" + b"\x08\0\0\0" * 5)):
        yield f"absurd EXIF {number}", saved("JPEG", exif=b"Exif\0\0" + blob)
    for orientation in (0, 9, 65_535):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield f"orientation {orientation}", saved("JPEG", exif=exif)
    # A directory of EXIF data that is its own next one.
    loop = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\x08\0\0\0"
    yield "EXIF in a circle", saved("JPEG", exif=b"Exif\0\0" + loop)
    yield "png with a zip behind", saved("PNG") + b"PK\x03\x04" + b"\0" * 100
    yield "jpeg with a page behind", saved("JPEG") + b"<script>alert(1)</script>"
    yield "gif with a page behind", saved("GIF") + b"<script>alert(1)</script>"
    yield "png with chunks of no meaning", png(30, 20, None, *[chunk(b"teSt", b"x" * 50)] * 200)


def invalid() -> Iterator[tuple[str, bytes]]:
    """Files that are no picture, or no whole one, or too large a one."""
    rng = random.Random(SEED)
    for name, data in files().items():
        first_frame = len(data) if "animated" not in name else len(data) // 4
        places = sorted(rng.randrange(first_frame - 4) for _ in range(9))
        for place in {0, *places}:
            yield f"{name} cut at {place}", data[:place]
        yield f"{name} with another magic", b"\x00\x01" + data[2:]
        yield f"{name} of noise", data[:24] + rng.randbytes(800)
    whole = saved("PNG")
    for kind in (b"IHDR", b"IDAT", b"IEND"):
        at = whole.index(kind)
        size = struct.unpack(">I", whole[at - 4 : at])[0]
        broken = bytearray(whole)
        broken[at + 4 + size] ^= 0x40
        yield f"png with a broken checksum of {kind.decode()}", bytes(broken)
    for width, height in ((0, 5), (5, 0), (0, 0)):
        yield f"png of {width} x {height}", png(width, height, zlib.compress(b""))
        yield f"bmp of {width} x {height}", sized_bmp(width, height)
        yield f"gif of {width} x {height}", sized_gif(width, height)
        yield f"jpeg of {width} x {height}", sized_jpeg(width, height)
    for width, height in ((4001, 4000), (60_000, 60_000), (2**31 - 1, 2**31 - 1), (2**31, 1)):
        yield f"png of {width} x {height}", png(width, height, zlib.compress(b"\0" * 100_000))
        yield f"tiff of {width} x {height}", sized_tiff(width, height)
        yield f"bmp of {width} x {height}", sized_bmp(width, height)
    for edge in (16_383, 65_535):
        yield f"gif of {edge} x {edge}", sized_gif(edge, edge)
        yield f"jpeg of {edge} x {edge}", sized_jpeg(edge, edge)
    yield "webp of 16383 x 16383", sized_webp()
    yield (
        "png with a bomb of text",
        png(30, 20, None, chunk(b"zTXt", b"k\0\0" + zlib.compress(b"x" * 200_000_000, 9))),
    )
    yield "jpeg of many scans", scanned(200, 4000)
    yield "png of many chunks", png(30, 20, None, chunk(b"teSt", b"abc") * 70_000)
    yield "png of too few pixels", png(500, 500, zlib.compress(b"\0" * 100))
    yield "png whose pixels are no zlib", png(30, 20, rng.randbytes(100))
    yield "tiff whose strip is elsewhere", sized_tiff(30, 20, offset=0x7FFFFFFF)
    yield "tiff whose strip is endless", sized_tiff(30, 20, size=0xFFFFFFFF)
    for name, head in {
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        "svg with entities": b"<?xml version='1.0'?><!DOCTYPE s [<!ENTITY a 'aaaa'>]><svg>&a;</svg>",
        "pdf": b"%PDF-1.7\n1 0 obj\n",
        "pdf before a png": b"%PDF-1.7\n" + whole,
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n",
        "zip": b"PK\x03\x04",
        "program": b"\x7fELF\x02\x01\x01",
        "icon": b"\0\0\x01\0\x01\0",
        "photoshop": b"8BPS\0\x01",
        "jpeg 2000": b"\0\0\0\x0cjP  \r\n\x87\n",
        "avif": b"\0\0\0\x20ftypavif",
        "video": b"\0\0\0\x20ftypisom",
        "page": b"<!doctype html>",
        "shell": b"#!/bin/sh\n",
        "fits": b"SIMPLE  =                    T",
        "portable": b"P6 1000000 1000000 255\n",
        "one byte": b"\x89",
    }.items():
        yield name, head


def sized_bmp(width: int, height: int) -> bytes:
    head = struct.pack("<IIIHHIIIIII", 40, width & 0xFFFFFFFF, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head


def sized_gif(width: int, height: int) -> bytes:
    size = struct.pack("<HH", width, height)
    frame = b"\x2c\0\0\0\0" + size + b"\0\x02\x02\x4c\x01\0"
    return b"GIF89a" + size + b"\x80\0\0" + b"\0" * 6 + frame + b";"


def sized_jpeg(width: int, height: int) -> bytes:
    whole = bytearray(saved("JPEG"))
    at = whole.index(b"\xff\xc0")
    whole[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(whole)


def sized_webp() -> bytes:
    whole = bytearray(saved("WEBP", lossless=True))
    at = whole.index(b"VP8L") + 9
    whole[at : at + 4] = b"\xff" * 3 + bytes([whole[at + 3] & 0xF0 | 0x0F])
    return bytes(whole)


def sized_tiff(width: int, height: int, *, offset: int = 8, size: int = 100) -> bytes:
    entries = (
        *((256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 1), (262, 3, 1)),
        *((273, 4, offset), (277, 3, 1), (278, 4, height), (279, 4, size)),
    )
    table = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + table + b"\0\0\0\0"


def pictures() -> list[Hostile]:
    """All of them, and data URIs that are none."""
    found = [Hostile(name, make_data_uri(data), data) for name, data in valid()]
    found += [Hostile(name, make_data_uri(data)) for name, data in invalid()]
    data = saved("PNG")
    text = base64.b64encode(data).decode()
    for name, url in {
        "letter case": f"DATA:Image/PNG;BASE64,{text}",
        "parameters": f"data:image/png;charset=utf-8;a=b;base64,{text}",
        "line breaks": f"data:image/png;base64,\r\n{text[:70]}\n {text[70:]}\r\n",
        "the alphabet of URLs": "data:image/png;base64,"
        + base64.urlsafe_b64encode(data).decode().rstrip("="),
        "no base64": "data:image/png," + "".join(f"%{byte:02x}" for byte in data),
        "no type": f"data:;base64,{text}",
        "another picture's type": f"data:image/gif;base64,{text}",
    }.items():
        found.append(Hostile(f"URI with {name}", url, data))
    for name, url in {
        "nothing": "data:",
        "no comma": "data:image/png;base64",
        "no content": "data:image/png;base64,",
        "white space": "data:image/png;base64,   \n ",
        "another in it": f"data:image/png;base64,data:image/png;base64,{text}",
        "another in it, encoded": make_data_uri(make_data_uri(data).encode()),
        "letters of no alphabet": "data:image/png;base64,@@@@",
        "letters outside ASCII": "data:image/png;base64,\N{SNOWMAN}" + text,
        "padding in the middle": f"data:image/png;base64,{text[:50]}=={text[50:]}",
        "one letter too many": f"data:image/png;base64,{text[:41]}",
        "half an escape": "data:image/png,%8",
        "base64 in base64": make_data_uri(text.encode()),
        "a page's type": f"data:text/html;base64,{text}",
        "a video's type": f"data:video/mp4;base64,{text}",
        "a script": "data:text/javascript,alert(1)",
        "a NUL": "data:image/png;base64,\0" + text,
    }.items():
        found.append(Hostile(f"URI with {name}", url))
    return found


def recordings() -> Iterator[tuple[str, str, bytes]]:
    """Name, modality and bytes of what is no video or sound recording of a type that is read."""
    rng = random.Random(SEED)
    sound = io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(b"\0\0" * 800)
    for modality in ("video", "audio"):
        for place in (0, 1, 3, 5, 7):
            yield f"{modality} cut at {place}", modality, (b"\0\0\0\x20ftypisom")[:place]
        for name, data in {
            "noise": b"\x01" + rng.randbytes(2000),
            "a picture": saved("PNG"),
            "a page": b"<!doctype html>",
            "a playlist": b"#EXTM3U\nfile:///etc/passwd\n",
            "a list of files": b"ffconcat version 1.0\nfile /etc/passwd\n",
            "a streaming manifest": b"<?xml version='1.0'?><MPD></MPD>",
            "a session description": b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\n",
            "a zip": b"PK\x03\x04",
        }.items():
            yield f"{modality} that is {name}", modality, data
    yield "video that is sound", "video", sound.getvalue()
    yield "audio that is AVI", "audio", b"RIFF\n\0\0\0AVI LIST" + bytes(20)
