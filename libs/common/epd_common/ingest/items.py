"""Items of a request: their keys, and what is asked of items that a client made itself. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from epd_common.errors import TooLargeError
from epd_common.ingest.body import MediaPart
from epd_common.ingest.parts import ItemSource, invalid
from epd_common.ingest.processor_args import check_arguments_fit, check_processor_args
from epd_common.protocol import Item, Media
from epd_common.protocol.jobs import Modality
from epd_common.protocol.keys import embedding_key, is_key
from epd_common.store.media import StoredFile


@dataclass(frozen=True, slots=True)
class Keying:
    """What a request adds to a media digest to make a key (invariant I9)."""

    fingerprint: str
    scope: str
    processor_args: dict[str, Any]

    def new(self, stored: StoredFile, modality: Modality) -> Item:
        """The item for media that the body brought."""
        return self._build(Item(modality=modality, media=Media()), stored, self.processor_args)

    def complete(self, raw: Item, stored: StoredFile, place: str) -> Item:
        """The item for inline media of a direct job. What the client claimed must be true."""
        item = self._build(raw, stored, self._args_of(raw, place))
        for name, claimed, real in (
            ("digest", raw.digest, item.digest),
            ("key", raw.key, item.key),
        ):
            if claimed not in ("", real):
                raise _mismatch(f"{place}.{name}", claimed, real)
        return item

    def verify(self, item: Item, place: str) -> Item:
        """An item that names media in the store. Nobody may give one picture the key of another."""
        if not is_key(item.digest):
            raise invalid(
                f"{place}.digest",
                f"{place} names stored media, so it needs the SHA-256 of its bytes as digest, "
                "in 64 lower-case hexadecimal characters",
            )
        if item.media.ref != item.digest:
            raise _mismatch(f"{place}.media.ref", item.media.ref or "", item.digest)
        real = self._key(item, item.digest, self._args_of(item, place))
        if item.key != real:
            raise _mismatch(f"{place}.key", item.key, real)
        return item

    def _build(self, item: Item, stored: StoredFile, args: dict[str, Any]) -> Item:
        return msgspec.structs.replace(
            item,
            media=Media(ref=stored.ref, content_type=stored.content_type),
            key=self._key(item, stored.digest, args),
            digest=stored.digest,
            width=stored.width,
            height=stored.height,
            processor_args=args,
        )

    def _args_of(self, item: Item, place: str) -> dict[str, Any]:
        """The engine takes one set of processor arguments for a whole request."""
        if item.processor_args and self.processor_args not in ({}, item.processor_args):
            raise invalid(
                f"{place}.processor_args",
                f"{place} has other processor_args than mm_processor_kwargs of the body",
            )
        return item.processor_args or self.processor_args

    def _key(self, item: Item, media_digest: str, args: dict[str, Any]) -> str:
        return embedding_key(
            media_digest=media_digest,
            fingerprint=self.fingerprint,
            modality=item.modality,
            processor_args=args,
            scope=self.scope,
        )


def check_modalities(
    parts: Sequence[MediaPart],
    items: Sequence[Item],
    modalities: Sequence[str],
    args: dict[str, Any],
) -> None:
    """Refuse media that the model cannot take, and processor arguments that go with none of them.

    Raises:
        BadRequestError: naming the part, or the arguments.
    """
    for part in parts:
        check_arguments_fit(args, part.modality_in(items), "mm_processor_kwargs")
        modality = part.modality_in(items)
        if modality not in modalities:
            raise invalid(
                part.place,
                f"{part.place} is {modality} input, and this model takes "
                f"{' and '.join(modalities) or 'text alone'}",
                "modality_not_supported",
            )


def check_items(items: Sequence[Item], parts: Sequence[MediaPart], max_inline_bytes: int) -> None:
    """Check the items of a direct job, and that body and items fit each other, before any work.

    Raises:
        BadRequestError: naming the item or the part.
        TooLargeError: ``inline_too_large``.
    """
    named: set[int] = set()
    for part in parts:
        if isinstance(part.source, ItemSource):
            if not 0 <= part.source.index < len(items):
                raise invalid(
                    f"{part.place}.item",
                    f"{part.place} refers to item {part.source.index}, "
                    f"and the job brings {len(items)} items",
                    "invalid_media_ref",
                )
            named.add(part.source.index)
    inline_bytes = 0
    for n, item in enumerate(items):
        _check_item(item, n in named, f"items[{n}]")
        inline_bytes += len(item.media.inline or b"")
    if inline_bytes > max_inline_bytes:
        raise TooLargeError(
            f"the job brings {inline_bytes} bytes of inline media; at most {max_inline_bytes} are "
            "allowed; put them into the media store and send references",
            code="inline_too_large",
            param="items",
            stage="ingest",
        )


def _check_item(item: Item, named: bool, place: str) -> None:
    if not named:
        raise invalid(place, f"no part of the body refers to {place}", "invalid_media_ref")
    check_processor_args(item.processor_args, f"{place}.processor_args")
    check_arguments_fit(item.processor_args, item.modality, f"{place}.processor_args")
    if (item.media.inline is None) == (not item.media.ref):
        raise invalid(f"{place}.media", f"{place}.media must have either ref or inline")


def _mismatch(place: str, claimed: str, real: str) -> Exception:
    return invalid(
        place,
        f"{place} is {claimed[:64]!r}, but by digest, model fingerprint, processor arguments and "
        f"cache scope it is {real!r}; was the job made for another model or revision?",
        "key_mismatch",
    )
