"""Pictures: type and size from the header, then a full decode.

The decode throws its pixels away. It is there because a file that breaks later would break an encode
job, or be shown to the model half grey: vLLM lets some truncated files pass. The client's own bytes
are what is stored and encoded.

A JPEG is decoded at an eighth of its size. Its data are read to their end all the same, so whatever is wrong
with them is found as well, in half the time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO

from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.ExifTags import Base
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import jpeg_factory
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from epd_common.decoding.structure import TooComplexError, check_directory, check_structure

_PNG_END = b"IEND\xaeB\x60\x82"

_SIDEWAYS = range(5, 9)
"""The EXIF orientations that swap width and height."""


@dataclass(frozen=True, slots=True)
class Picture:
    """What was found: the real type, and the size in pixels as the model sees it (EXIF turned)."""

    content_type: str
    width: int
    height: int


class TooManyPixelsError(Exception):
    """The header tells of more pixels than are allowed; the text says how many."""


class CorruptError(Exception):
    """The file cannot be decoded; the text is the decoder's own reason, of at most 200 characters."""


@dataclass(frozen=True, slots=True)
class _Format:
    content_type: str
    magic: re.Pattern[bytes]
    open: Callable[[BytesIO, str], ImageFile.ImageFile]


def _format(subtype: str, magic: bytes, opener: Callable[..., ImageFile.ImageFile]) -> _Format:
    return _Format(f"image/{subtype}", re.compile(magic, re.DOTALL), opener)


# The readers are called directly: `Image.open` would try others, and warns by its own pixel limit.
_FORMATS = (
    _format("png", rb"\x89PNG\r\n\x1a\n", PngImageFile),
    _format("jpeg", rb"\xff\xd8\xff", jpeg_factory),
    _format("webp", rb"RIFF.{4}WEBP", WebPImageFile),
    _format("gif", rb"GIF8[79]a", GifImageFile),
    _format("bmp", rb"BM", BmpImageFile),
    _format("tiff", rb"II[*+]\x00|MM\x00[*+]", TiffImageFile),
)

SUPPORTED_TYPES = tuple(entry.content_type for entry in _FORMATS)


def recognise(data: bytes) -> str | None:
    """The content type of a picture by its first bytes; None if it is none that is read here."""
    entry = _find(data)
    return entry.content_type if entry else None


def picture_size(data: bytes) -> tuple[int, int]:
    """Width and height in pixels as the model sees them (EXIF turned), from the header alone.

    Raises:
        ValueError: not a picture that is read here.
    """
    entry = _find(data)
    if entry is None:
        raise ValueError("its type is not supported")
    try:
        with entry.open(BytesIO(data), "") as image:
            width, height = image.size
            # A PNG's may stand behind its pixels, which would all be decoded.
            turned = image.format != "PNG" and _orientation(image) in _SIDEWAYS
    except Exception as error:  # Pillow's readers raise nearly anything on hostile bytes
        raise ValueError(_reason(error)) from error
    return (height, width) if turned else (width, height)


def _no_matter(pixels: int) -> None:
    pass


def decode(data: bytes, max_pixels: int, on_pixels: Callable[[int], None] = _no_matter) -> Picture:
    """Decode a picture fully, and say what it is.

    Args:
        on_pixels: Told of how many there are before they are decoded.

    Raises:
        TooComplexError: it has too many parts, whatever they are.
        TooManyPixelsError: seen in the header, before anything is decoded.
        CorruptError: it is truncated or corrupt.
        MemoryError: there is not enough.
    """
    # A switch of the whole process that some libraries turn on; with it, half a file is a picture.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    entry = _find(data)
    if entry is None:
        raise CorruptError("its type is not supported")
    check_structure(data, entry.content_type)
    try:
        with entry.open(BytesIO(data), "") as image:
            pixels = image.width * image.height
            if pixels <= max_pixels:
                on_pixels(pixels)
                return _decode(image, data, entry.content_type)
    except (MemoryError, TooComplexError):
        raise
    except Image.DecompressionBombError:
        raise TooManyPixelsError("too many") from None
    except Exception as error:  # Pillow's readers raise nearly anything on hostile bytes
        raise CorruptError(_reason(error)) from error
    raise TooManyPixelsError(str(pixels))


def _find(data: bytes) -> _Format | None:
    return next((entry for entry in _FORMATS if entry.magic.match(data)), None)


def _reason(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__


def _decode(image: ImageFile.ImageFile, data: bytes, content_type: str) -> Picture:
    if content_type == "image/png":
        # Loading skips the checksums of the pixel chunks and accepts a missing end.
        if _PNG_END not in data:
            raise ValueError("its end is missing")
        with PngImageFile(BytesIO(data), "") as twin:
            twin.verify()
    size = None
    if content_type == "image/jpeg":
        size = image.size
        image.draft(None, (1, 1))
    image.load()
    if not image.width or not image.height:
        raise ValueError("no pixels")
    width, height = size or image.size  # a TIFF is turned while it is loaded
    exif = image.info.get("exif")
    if isinstance(exif, bytes):
        check_directory(exif.removeprefix(b"Exif\0\0"))
    if _orientation(image) in _SIDEWAYS:
        width, height = height, width
    return Picture(content_type, width, height)


def _orientation(image: Image.Image) -> int:
    # vLLM shows a picture with unreadable EXIF data unturned.
    try:
        return int(image.getexif().get(Base.Orientation, 1))
    except MemoryError:
        raise
    except Exception:
        return 1
