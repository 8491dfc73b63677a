"""Ingest: from a client's request to a body with references and items with keys.

The gateway, PD workers (for jobs that clients publish themselves) and the client library all use it. It
reads, checks, digests and stores media; it looks at and publishes nothing on the bus.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epd_common.errors import NotFoundError
from epd_common.ingest.body import MediaPart, extract
from epd_common.ingest.data_uri import is_data_uri, parse_data_uri
from epd_common.ingest.items import Keying, check_items, check_modalities
from epd_common.ingest.limits import IngestLimits
from epd_common.ingest.media import Fetch, FetchedMedia, FileLookup, MediaStore
from epd_common.ingest.parts import FileSource, ItemSource, Source, UrlSource, invalid
from epd_common.ingest.pictures import PictureChecker
from epd_common.ingest.recordings import check_recording
from epd_common.ingest.reserved import check_reserved
from epd_common.protocol import Item
from epd_common.protocol.jobs import Modality
from epd_common.protocol.keys import digest
from epd_common.store.media import StoredFile

_OFFLOAD_BYTES = 1 << 20
"""Above this, hashing or base64 would hold the event loop for about a millisecond. Below it a thread costs
more than it spares, as both want the interpreter's lock."""

_Wanted = tuple[Modality | None, Source | str]
"""What a part asks for; parts that ask for the same are loaded once."""


def _wanted(part: MediaPart) -> _Wanted:
    # Data URIs by their place: equal bytes are found by their digest, and comparing the text takes longer.
    data = isinstance(part.source, UrlSource) and is_data_uri(part.source.url)
    return part.modality, part.place if data else part.source


@dataclass(frozen=True, slots=True)
class Prepared:
    """A body whose media parts are ``{"type": "media_ref", "item": N}``, and its distinct items.

    Items stand in the order in which the request first names them.
    """

    body: dict[str, Any]
    items: list[Item]


class Ingest:
    """Prepares requests.

    Args:
        media: Where media bytes go.
        pictures: The checker, already entered.
        limits: What a request may cost.
        fetch: Fetches URLs; ``None`` refuses them.
        files: Finds uploaded files; ``None`` where there are none.
    """

    def __init__(
        self,
        media: MediaStore,
        pictures: PictureChecker,
        limits: IngestLimits,
        fetch: Fetch | None = None,
        files: FileLookup | None = None,
    ) -> None:
        self._media = media
        self._pictures = pictures
        self._limits = limits
        self._fetch = fetch
        self._files = files

    async def prepare(
        self,
        *,
        route: str,
        body: dict[str, Any],
        fingerprint: str,
        scope: str,
        owner: str | None = None,
        special_tokens: Sequence[str],
        special_token_ids: Sequence[int] = (),
        modalities: Sequence[str],
        items: Sequence[Item] = (),
    ) -> Prepared:
        """Check the request, and load, check and store its media.

        Args:
            route: The HTTP route the body belongs to.
            body: The OpenAI body; it is not changed.
            fingerprint: Of the model that will read the media.
            scope: Whose cache entries these may be (tenant).
            owner: The tenant whose uploads the body may name, in whose quota its media are, and whose turns
                they take, where that is not the scope.
            special_tokens: What no text may hold.
            special_token_ids: Their ids, in the same order.
            modalities: What the model takes beside text.
            items: Those of a direct job, which ``media_ref`` parts of the body point at.

        Raises:
            EpdError: The first thing that is wrong; ``param`` names its place.
        """
        found = extract(route, body, max_items=self._limits.max_items)
        check_reserved(route, found.body, special_tokens, special_token_ids)
        check_items(items, found.parts, self._limits.max_inline_bytes)
        check_modalities(found.parts, items, modalities, found.processor_args)
        keying = Keying(fingerprint, scope, found.processor_args)
        loaded = await self._load_all(found.parts, items, keying, scope if owner is None else owner)
        distinct: dict[str, Item] = {}
        numbers: dict[str, int] = {}
        for part in found.parts:
            item = loaded[_wanted(part)]
            distinct.setdefault(item.key, item)
            part.reference["item"] = numbers.setdefault(item.key, len(numbers))
        return Prepared(found.body, list(distinct.values()))

    async def admit(self, data: bytes, *, declared: str = "", place: str, owner: str) -> StoredFile:
        """Check one picture and store it, in the quota of the tenant ``owner``: what an upload needs."""
        media = FetchedMedia(data, declared)
        return await self._admit(media, await _digest(data), "image", place, owner)

    async def _admit(
        self, media: FetchedMedia, media_digest: str, modality: Modality, place: str, owner: str
    ) -> StoredFile:
        data, declared = media.data, media.content_type
        width = height = 0
        if modality == "image":
            picture = await self._pictures.check(
                data, declared=declared, place=place, owner=owner, digest=media_digest
            )
            content_type, width, height = picture.content_type, picture.width, picture.height
        else:
            limit = self._limits.max_media_bytes
            content_type = check_recording(
                data, modality, declared=declared, max_bytes=limit, place=place
            )
        ref = await self._media.put(
            data, digest=media_digest, content_type=content_type, owner=owner
        )
        return StoredFile(
            digest=media_digest,
            ref=ref,
            content_type=content_type,
            width=width,
            height=height,
            bytes=len(data),
        )

    async def _load_all(
        self, parts: Sequence[MediaPart], items: Sequence[Item], keying: Keying, owner: str
    ) -> dict[_Wanted, Item]:
        """Load every distinct source at the same time; the first failure ends the others."""
        if not parts:
            return {}
        gate = asyncio.Semaphore(self._limits.concurrent_loads)
        admitted: dict[tuple[Modality, str], asyncio.Task[StoredFile]] = {}
        tasks: dict[_Wanted, asyncio.Task[Item]] = {}
        failure: BaseException | None = None

        async def admit_once(media: FetchedMedia, modality: Modality, place: str) -> StoredFile:
            media_digest = await _digest(media.data)
            same = (modality, media_digest)
            if same not in admitted:
                admitted[same] = group.create_task(
                    self._admit(media, media_digest, modality, place, owner)
                )
            return await admitted[same]

        async def load(source: Source, modality: Modality, place: str) -> Item:
            async with gate:
                match source:
                    case UrlSource(url):
                        media = await self._read(url, place, owner)
                        return keying.new(await admit_once(media, modality, place), modality)
                    case FileSource(file_id):
                        stored = await self._look_up(file_id, owner, place)
                        return keying.new(stored, modality)
                    case ItemSource(index):
                        item, place = items[index], f"items[{index}]"
                        if item.media.inline is None:
                            return keying.verify(item, place)
                        media = FetchedMedia(item.media.inline, item.media.content_type)
                        stored = await admit_once(media, modality, place)
                        return keying.complete(item, stored, place)

        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    wanted = _wanted(part)
                    if wanted not in tasks:
                        tasks[wanted] = group.create_task(
                            load(part.source, part.modality_in(items), part.place)
                        )
        except BaseExceptionGroup as failures:
            failure = _first(failures)
        if failure is not None:
            raise failure
        return {wanted: task.result() for wanted, task in tasks.items()}

    async def _read(self, url: str, place: str, owner: str) -> FetchedMedia:
        if is_data_uri(url):
            limit = self._limits.max_media_bytes
            if len(url) <= _OFFLOAD_BYTES:
                uri = parse_data_uri(url, max_bytes=limit, place=place)
            else:
                uri = await asyncio.to_thread(parse_data_uri, url, max_bytes=limit, place=place)
            return FetchedMedia(uri.data, uri.content_type)
        scheme = url.lstrip().partition(":")[0].lower()
        if scheme not in ("http", "https"):
            raise invalid(
                place,
                f"the URL at {place} must begin with https: or data:",
                "media_url_refused",
            )
        if self._fetch is None:
            raise invalid(
                place,
                f"the URL at {place} is not fetched here; send the request to a gateway, "
                "or the media as a data URI",
                "media_url_refused",
            )
        return await self._fetch(url, place, owner=owner)

    async def _look_up(self, file_id: str, owner: str, place: str) -> StoredFile:
        stored = await self._files.lookup(file_id, owner) if self._files is not None else None
        if stored is None:
            raise NotFoundError(
                f"there is no file {file_id[:100]!r} (named at {place}); upload it to /v1/files",
                code="file_not_found",
                param=place,
                stage="ingest",
            )
        return stored


async def _digest(data: bytes) -> str:
    return digest(data) if len(data) <= _OFFLOAD_BYTES else await asyncio.to_thread(digest, data)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that came first; the group lists them in order of time."""
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
