"""Pictures: type and size from the header, then a full decode in a bounded pool.

The decode throws its pixels away. It is there because a file that breaks later would break an encode
job, or be shown to the model half grey: vLLM lets some truncated files pass. The client's own bytes
are what is stored and encoded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from types import TracebackType
from typing import Self

from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.ExifTags import Base
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import jpeg_factory
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from epd_common.errors import BadRequestError, BusyError, TooLargeError, UnsupportedMediaError
from epd_common.ingest.limits import IngestLimits, media_too_large

_PNG_END = b"IEND\xaeB\x60\x82"

_SIDEWAYS = range(5, 9)
"""The EXIF orientations that swap width and height."""

NO_STATEMENT = ("", "application/octet-stream", "binary/octet-stream")
"""Declared types that say nothing; object stores answer with them for files of unknown type."""


@dataclass(frozen=True, slots=True)
class Picture:
    """What was found: the real type, and the size in pixels as the model sees it (EXIF turned)."""

    content_type: str
    width: int
    height: int


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


def picture_size(data: bytes) -> tuple[int, int]:
    """Width and height in pixels as the model sees them (EXIF turned), from the header alone.

    Raises:
        ValueError: not a picture that is read here.
    """
    for entry in _FORMATS:
        if entry.magic.match(data):
            break
    else:
        raise ValueError("its type is not supported")
    try:
        with entry.open(BytesIO(data), "") as image:
            width, height = image.size
            # A PNG's may stand behind its pixels, which would all be decoded.
            turned = image.format != "PNG" and _orientation(image) in _SIDEWAYS
    except Exception as error:  # Pillow's readers raise nearly anything on hostile bytes
        raise ValueError(str(error)[:200] or type(error).__name__) from error
    return (height, width) if turned else (width, height)


class PictureChecker:
    """Checks pictures, ``limits.decode_workers`` at a time."""

    def __init__(self, limits: IngestLimits) -> None:
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.decode_workers)
        self._waiting = 0
        self._threads = ThreadPoolExecutor(limits.decode_workers, thread_name_prefix="epd-decode")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)

    async def check(self, data: bytes, *, declared: str = "", place: str) -> Picture:
        """Check one picture.

        Args:
            data: The file's bytes.
            declared: The type that the data URI or the HTTP answer claims, parameters allowed.
            place: Where the picture stands in the request, for errors.

        Raises:
            UnsupportedMediaError: Not a picture, or of a type that is not read here.
            TooLargeError: ``media_too_large`` or ``too_many_pixels``.
            BadRequestError: ``invalid_image`` (truncated, corrupt) or ``decode_timeout``.
            BusyError: Too many pictures wait already.
        """
        entry = self._recognise(data, declared, place)
        await self._take_slot()
        loop = asyncio.get_running_loop()
        work = self._threads.submit(_inspect, data, entry, self._limits.max_pixels, place)
        # The thread's end frees the slot, not the caller's: a decode cannot be interrupted, and
        # one that timed out still has its thread and its pixels.
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._slots.release))
        try:
            async with asyncio.timeout(self._limits.decode_timeout_s):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            raise BadRequestError(
                f"the picture at {place} took longer than {self._limits.decode_timeout_s} s "
                "to decode; send a smaller one",
                code="decode_timeout",
                param=place,
                stage="ingest",
            ) from None

    def _recognise(self, data: bytes, declared: str, place: str) -> _Format:
        if len(data) > self._limits.max_media_bytes:
            raise media_too_large(place, self._limits.max_media_bytes, len(data))
        claim = declared.partition(";")[0].strip().lower()
        # A wrong `image/...` is common in the wild and does no harm; another type means that the
        # sender meant something else, such as a page that says "not found".
        if claim in NO_STATEMENT or claim.startswith("image/"):
            for entry in _FORMATS:
                if entry.magic.match(data):
                    return entry
            found = "its bytes are none of them"
        else:
            found = f"it is declared as {claim[:100]!r}"
        raise UnsupportedMediaError(
            f"the media at {place} is not a picture of a supported type "
            f"({', '.join(SUPPORTED_TYPES)}): {found}",
            param=place,
            stage="ingest",
        )

    async def _take_slot(self) -> None:
        if self._slots.locked() and self._waiting >= self._limits.decode_queue:
            raise BusyError(
                f"{self._waiting} pictures wait to be checked; try again in a moment",
                stage="ingest",
                retry_after_s=1.0,
            )
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1


def _inspect(data: bytes, entry: _Format, max_pixels: int, place: str) -> Picture:
    """Runs in a thread."""
    # A switch of the whole process that some libraries turn on; with it, half a file is a picture.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with entry.open(BytesIO(data), "") as image:
            pixels = image.width * image.height
            if pixels <= max_pixels:
                return _decode(image, data, entry.content_type)
    except Image.DecompressionBombError:
        pixels = 0
    except Exception as error:  # Pillow's readers raise nearly anything on hostile bytes.
        raise BadRequestError(
            f"the picture at {place} cannot be decoded; it is truncated or corrupt "
            f"({entry.content_type}: {str(error)[:200] or type(error).__name__})",
            code="invalid_image",
            param=place,
            stage="ingest",
        ) from error
    raise TooLargeError(
        f"the picture at {place} has {pixels or 'too many'} pixels; "
        f"at most {max_pixels} are allowed",
        code="too_many_pixels",
        param=place,
        stage="ingest",
    )


def _decode(image: ImageFile.ImageFile, data: bytes, content_type: str) -> Picture:
    if content_type == "image/png":
        # Loading skips the checksums of the pixel chunks and accepts a missing end.
        if _PNG_END not in data:
            raise ValueError("its end is missing")
        with PngImageFile(BytesIO(data), "") as twin:
            twin.verify()
    image.load()
    if not image.width or not image.height:
        raise ValueError("no pixels")
    width, height = image.size
    if _orientation(image) in _SIDEWAYS:
        width, height = height, width
    return Picture(content_type, width, height)


def _orientation(image: Image.Image) -> int:
    # vLLM shows a picture with unreadable EXIF data unturned.
    try:
        return int(image.getexif().get(Base.Orientation, 1))
    except Exception:
        return 1
