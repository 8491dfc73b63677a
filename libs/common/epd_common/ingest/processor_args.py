"""Which processor arguments a client may give.

They reach the model's own preprocessing. Arguments that change the shape of what the vision tower gets
(patch size, merge size, ...) can end the whole engine, so only those that bound a picture's size pass, and
these within bounds: a picture is blown up to its smallest size, however small it is, and that takes memory.
Videos take none, as they would be blown up frame by frame.
"""

from __future__ import annotations

from typing import Any

from epd_common.ingest.parts import invalid

LARGEST_LEAST = 1 << 20
"""Pixels of the smallest size that may be asked for."""

LARGEST_MOST = 1 << 24
"""Pixels of the largest size that may be asked for."""

_SIZES = {"min_pixels": LARGEST_LEAST, "max_pixels": LARGEST_MOST}
_EDGES = {"shortest_edge": LARGEST_LEAST, "longest_edge": LARGEST_MOST}
_UNSUPPORTED = "unsupported_parameter"


def check_processor_args(args: dict[str, Any], place: str) -> None:
    """Refuse arguments other than ``min_pixels``, ``max_pixels`` and ``size`` with its edges.

    Raises:
        BadRequestError: naming the argument.
    """
    for name, value in args.items():
        where = f"{place}.{name}"
        if name in _SIZES:
            _check_number(value, where, _SIZES[name])
        elif name == "size":
            if not isinstance(value, dict) or not value or not set(value) <= set(_EDGES):
                raise invalid(where, f"{where} must have {' and '.join(_EDGES)}")
            for edge, pixels in value.items():
                _check_number(pixels, f"{where}.{edge}", _EDGES[edge])
        else:
            allowed = ", ".join((*_SIZES, "size"))
            raise invalid(where, f"{where} is not allowed; these are: {allowed}", _UNSUPPORTED)


def arguments_schema() -> dict[str, Any]:
    """The JSON schemas of the arguments, by name."""

    def numbers(bounds: dict[str, int]) -> dict[str, Any]:
        return {
            name: {"type": "integer", "minimum": 1, "maximum": most}
            for name, most in bounds.items()
        }

    edges = {"type": "object", "properties": numbers(_EDGES), "minProperties": 1}
    return numbers(_SIZES) | {"size": edges | {"additionalProperties": False}}


def _check_number(value: object, where: str, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise invalid(where, f"{where} must be a whole number from 1 to {most}")


def check_arguments_fit(args: dict[str, Any], modality: str, place: str) -> None:
    """Refuse arguments for media that take none.

    Raises:
        BadRequestError: naming the place of the arguments.
    """
    if args and modality != "image":
        raise invalid(place, f"{place} cannot be set where there is {modality} input", _UNSUPPORTED)
