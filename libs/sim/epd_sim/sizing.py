"""How many rows an item has, and what a decoder is told of it in place of the media.

Pictures follow Qwen2-VL's grid: edges are rounded to whole rows, and a picture that is too large or too small
keeps its shape (``smart_resize`` of its processor). Videos and recordings are not decoded: their
length in bytes stands for the one in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from epd_common.decoding.pictures import picture_size
from epd_common.errors import BadRequestError

MERGE = 2
"""Patches along each edge of what becomes one row."""

MIN_ROWS = 4
MAX_ASPECT_RATIO = 200
"""Both as in Qwen2-VL's processor."""

VIDEO_GRID = 16
"""Patches along each edge of a frame."""

VIDEO_BYTES_PER_GRID = 16 * 1024
MAX_GRIDS = 64
AUDIO_BYTES_PER_ROW = 1280
"""25 rows a second, as in Qwen2-Audio, of 16-bit samples at 16 kHz."""

MAX_AUDIO_ROWS = 750


@dataclass(frozen=True, slots=True)
class Size:
    """Rows of an embedding, and the metadata that say so, e.g. ``{"image_grid_thw": [1, 46, 46]}``."""

    rows: int
    metadata: dict[str, Any]


def size_of(
    modality: str, data: bytes, processor_args: dict[str, Any], *, patch: int, max_rows: int
) -> Size:
    """The size of an item.

    Args:
        processor_args: ``min_pixels``, ``max_pixels`` and ``size`` count, for pictures.
        patch: Edge of a patch, in pixels.
        max_rows: Of one picture, where the arguments do not say otherwise.

    Raises:
        BadRequestError: the bytes are no picture, or one that cannot be shown to a model.
    """
    if modality == "image":
        metadata = {"image_grid_thw": _image_grid(data, processor_args, patch, max_rows)}
    elif modality == "video":
        grids = min(1 + len(data) // VIDEO_BYTES_PER_GRID, MAX_GRIDS)
        metadata = {"video_grid_thw": [grids, VIDEO_GRID, VIDEO_GRID]}
    else:
        tokens = min(1 + len(data) // AUDIO_BYTES_PER_ROW, MAX_AUDIO_ROWS)
        return Size(tokens, {"audio_num_tokens": tokens})
    return Size(rows_of(modality, metadata), metadata)


def rows_of(modality: str, metadata: dict[str, Any]) -> int:
    """The rows that metadata speak of, which is the room that the item takes in a prompt."""
    if modality == "audio":
        return int(metadata["audio_num_tokens"])
    frames, height, width = metadata[f"{modality}_grid_thw"]
    return int(frames * height * width // MERGE**2)


def _image_grid(data: bytes, args: dict[str, Any], patch: int, max_rows: int) -> list[int]:
    try:
        width, height = picture_size(data)
    except ValueError as error:
        raise BadRequestError(
            f"the picture cannot be decoded: {error}", code="invalid_image", stage="encode"
        ) from error
    return grid_of(width, height, args, patch=patch, max_rows=max_rows)


def grid_of(
    width: int, height: int, args: dict[str, Any], *, patch: int, max_rows: int
) -> list[int]:
    """The grid of a picture of so many pixels; see :func:`size_of`.

    Raises:
        BadRequestError: it cannot be shown to a model.
    """
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise BadRequestError(
            f"the model cannot take this item: its edges are {width} and {height} pixels, and one may be "
            f"{MAX_ASPECT_RATIO} times the other at most",
            code="media_not_encodable",
            stage="encode",
        )
    edge = patch * MERGE
    bounds = args.get("size", {}) | args
    least = bounds.get("min_pixels", bounds.get("shortest_edge", MIN_ROWS * edge**2))
    most = bounds.get("max_pixels", bounds.get("longest_edge", max_rows * edge**2))
    down, across = (max(1, round(pixels / edge)) for pixels in (height, width))
    scale = math.sqrt(height * width / (most if down * across * edge**2 > most else least))
    if down * across * edge**2 > most:
        down, across = (max(1, int(pixels / scale / edge)) for pixels in (height, width))
    elif down * across * edge**2 < least:
        down, across = (math.ceil(pixels / scale / edge) for pixels in (height, width))
    return [1, down * MERGE, across * MERGE]
