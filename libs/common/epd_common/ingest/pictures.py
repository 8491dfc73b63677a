"""Pictures: what they are by their first bytes, then a full decode in a process that may die of it.

Processes are taken in turn by tenant. Who may take one is not judged by what the pictures cost; that is
bounded for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
from epd_common.decoding.structure import TooComplexError
from epd_common.errors import (
    BadRequestError,
    BusyError,
    EpdError,
    TooLargeError,
    UnavailableError,
    UnsupportedMediaError,
)
from epd_common.ingest.hopeless import Hopeless
from epd_common.ingest.limits import IngestLimits, media_too_large
from epd_common.places import FairPlaces, LineFullError

NO_STATEMENT = ("", "application/octet-stream", "binary/octet-stream")
"""Declared types that say nothing; object stores answer with them for files of unknown type."""


class PictureChecker:
    """Checks pictures, ``limits.decode_workers`` at a time.

    Args:
        several: Whether there are tenants to protect from each other. One never has the last process then,
            unless there is but one.
    """

    def __init__(
        self, limits: IngestLimits, *, several: Callable[[], bool] = lambda: False
    ) -> None:
        self._limits = limits
        self._places = FairPlaces(
            limits.decode_workers,
            share=max(1, limits.decode_workers - 1),
            line=limits.decode_queue,
            several=several,
        )
        self._hopeless = Hopeless()
        self._decoding: set[asyncio.Task[Picture]] = set()
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
        if self._decoding:
            await asyncio.wait(self._decoding)
        await self.pool.close()

    async def check(
        self, data: bytes, *, declared: str = "", place: str, owner: str = "", digest: str = ""
    ) -> Picture:
        """Check one picture.

        Args:
            data: The file's bytes.
            declared: The type that the data URI or the HTTP answer claims, parameters allowed.
            place: Where the picture stands in the request, for errors.
            owner: The tenant whose turn it takes.
            digest: Of the bytes. With it a picture that took too much is not tried again for a while.

        Raises:
            UnsupportedMediaError: Not a picture, or of a type that is not read here.
            TooLargeError: ``media_too_large``, ``too_many_pixels``, ``image_too_complex`` or
                ``decode_memory``.
            BadRequestError: ``invalid_image`` (truncated, corrupt) or ``decode_timeout``.
            BusyError: Too many pictures wait already.
            UnavailableError: No process that decodes can be started.
        """
        content_type = self._recognise(data, declared, place)
        try:
            self._check_hope(owner, digest)
            await self._take_place(owner)
            return await self._decode(data, owner, digest)
        except _FAULTS as error:
            raise self._explain(error, content_type, place) from error

    def _check_hope(self, owner: str, digest: str) -> None:
        if digest and (fault := self._hopeless.find(owner, digest)) is not None:
            raise fault

    async def _decode(self, data: bytes, owner: str, digest: str) -> Picture:
        """Decode in a place that was taken, and free it."""
        try:
            self._check_hope(owner, digest)  # the same may have come twice, and failed meanwhile
        except BaseException:
            self._places.give_back(owner)
            raise
        work = asyncio.create_task(self.pool.decode(data, self._limits.max_pixels), name="decode")
        self._decoding.add(work)

        def end(work: asyncio.Task[Picture]) -> None:
            self._decoding.discard(work)
            error = work.exception() if not work.cancelled() else None
            if digest and isinstance(error, DecodeMemoryError | DecodeTimeoutError):
                self._hopeless.add(owner, digest, type(error))
            self._places.give_back(owner)

        # The process's end frees the place, not the caller's, who may have been cancelled.
        work.add_done_callback(end)
        return await asyncio.shield(work)

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

    async def _take_place(self, owner: str) -> None:
        try:
            await self._places.take(owner)
        except LineFullError as error:
            raise BusyError(
                f"{error} pictures wait to be checked; try again in a moment",
                stage="ingest",
                retry_after_s=1.0,
            ) from None

    def _explain(self, error: Exception, content_type: str, place: str) -> EpdError:
        """The error for whoever sent the picture."""
        limits = self._limits
        match error:
            case TooManyPixelsError():
                kind: type[EpdError] = TooLargeError
                code = "too_many_pixels"
                text = f"has {error} pixels; at most {limits.max_pixels} are allowed"
            case TooComplexError():
                kind, code = TooLargeError, "image_too_complex"
                text = f"has {error}; save it again with another program, or in another format"
            case DecodeMemoryError():
                kind, code = TooLargeError, "decode_memory"
                text = (
                    f"takes more than {limits.decode_memory_bytes >> 20} MiB to decode; "
                    "send a smaller one, or another format"
                )
            case DecodeTimeoutError():
                kind, code = BadRequestError, "decode_timeout"
                text = (
                    "took longer to decode than a file of its size may "
                    f"({limits.decode_timeout_s:g} s at most); save it again, or send a smaller one"
                )
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
    TooComplexError,
    TooManyPixelsError,
    DecodeMemoryError,
    DecodeTimeoutError,
    DecoderDiedError,
    DecoderStartError,
)
