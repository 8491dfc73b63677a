"""Pictures: what they are by their first bytes, then a full decode in a process that may die of it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from epd_common.decoding.pictures import (
    SUPPORTED_TYPES,
    CorruptError,
    Picture,
    TooManyPixelsError,
    recognise,
)
from epd_common.decoding.pool import (
    DecodeMemoryError,
    DecoderDiedError,
    DecoderPool,
    DecoderStartError,
    DecodeTimeoutError,
)
from epd_common.errors import (
    BadRequestError,
    BusyError,
    EpdError,
    TooLargeError,
    UnavailableError,
    UnsupportedMediaError,
)
from epd_common.ingest.limits import IngestLimits, media_too_large

NO_STATEMENT = ("", "application/octet-stream", "binary/octet-stream")
"""Declared types that say nothing; object stores answer with them for files of unknown type."""


class PictureChecker:
    """Checks pictures, ``limits.decode_workers`` at a time."""

    def __init__(self, limits: IngestLimits) -> None:
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.decode_workers)
        self._waiting = 0
        # A thread for each process, which gives it its file and waits for its answer.
        self._threads = ThreadPoolExecutor(limits.decode_workers, thread_name_prefix="epd-decode")
        self.pool = DecoderPool(
            memory_bytes=limits.decode_memory_bytes, timeout_s=limits.decode_timeout_s
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
        await asyncio.to_thread(self.pool.close)

    async def check(self, data: bytes, *, declared: str = "", place: str) -> Picture:
        """Check one picture.

        Args:
            data: The file's bytes.
            declared: The type that the data URI or the HTTP answer claims, parameters allowed.
            place: Where the picture stands in the request, for errors.

        Raises:
            UnsupportedMediaError: Not a picture, or of a type that is not read here.
            TooLargeError: ``media_too_large``, ``too_many_pixels`` or ``decode_memory``.
            BadRequestError: ``invalid_image`` (truncated, corrupt) or ``decode_timeout``.
            BusyError: Too many pictures wait already.
            UnavailableError: No process that decodes can be started.
        """
        content_type = self._recognise(data, declared, place)
        await self._take_slot()
        loop = asyncio.get_running_loop()
        work = self._threads.submit(self.pool.decode, data, self._limits.max_pixels)
        # The thread's end frees the slot, not the caller's, who may have been cancelled.
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._slots.release))
        try:
            return await asyncio.wrap_future(work)
        except _FAULTS as error:
            raise self._explain(error, content_type, place) from error

    def _recognise(self, data: bytes, declared: str, place: str) -> str:
        if len(data) > self._limits.max_media_bytes:
            raise media_too_large(place, self._limits.max_media_bytes, len(data))
        claim = declared.partition(";")[0].strip().lower()
        # A wrong `image/...` is common in the wild and does no harm; another type means that the
        # sender meant something else, such as a page that says "not found".
        if claim in NO_STATEMENT or claim.startswith("image/"):
            if (content_type := recognise(data)) is not None:
                return content_type
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

    def _explain(self, error: Exception, content_type: str, place: str) -> EpdError:
        """The error for whoever sent the picture."""
        limits = self._limits
        match error:
            case TooManyPixelsError():
                kind: type[EpdError] = TooLargeError
                code = "too_many_pixels"
                text = f"has {error} pixels; at most {limits.max_pixels} are allowed"
            case DecodeMemoryError():
                kind, code = TooLargeError, "decode_memory"
                text = (
                    f"takes more than {limits.decode_memory_bytes >> 20} MiB to decode; "
                    "send a smaller one, or another format"
                )
            case DecodeTimeoutError():
                kind, code = BadRequestError, "decode_timeout"
                text = f"took longer than {limits.decode_timeout_s} s to decode; send a smaller one"
            case DecoderStartError():
                return UnavailableError(
                    f"no process that decodes pictures can be started here ({error}); try again later",
                    stage="ingest",
                    retry_after_s=5.0,
                )
            case DecoderDiedError():
                kind, code = BadRequestError, "invalid_image"
                text = (
                    f"cannot be decoded; it ended the process that tried ({content_type}: {error})"
                )
            case _:
                kind, code = BadRequestError, "invalid_image"
                text = f"cannot be decoded; it is truncated or corrupt ({content_type}: {error})"
        return kind(f"the picture at {place} {text}", code=code, param=place, stage="ingest")


_FAULTS = (
    CorruptError,
    TooManyPixelsError,
    DecodeMemoryError,
    DecodeTimeoutError,
    DecoderDiedError,
    DecoderStartError,
)
