"""Which processor arguments a client may give.

They reach the model's own preprocessing. Arguments that change the shape of what the vision tower gets
(patch size, merge size, ...) can end the whole engine, so only those that bound a picture's size pass.
"""

from __future__ import annotations

from typing import Any

from epd_common.ingest.parts import invalid

MAX_VALUE = 1_000_000_000
_SIZES = ("min_pixels", "max_pixels")
_EDGES = ("shortest_edge", "longest_edge")
_UNSUPPORTED = "unsupported_parameter"


def check_processor_args(args: dict[str, Any], place: str) -> None:
    """Refuse arguments other than ``min_pixels``, ``max_pixels`` and ``size`` with its edges.

    Raises:
        BadRequestError: naming the argument.
    """
    for name, value in args.items():
        where = f"{place}.{name}"
        if name in _SIZES:
            _check_number(value, where)
        elif name == "size":
            if not isinstance(value, dict) or not value or not set(value) <= set(_EDGES):
                raise invalid(where, f"{where} must have {' and '.join(_EDGES)}")
            for edge, pixels in value.items():
                _check_number(pixels, f"{where}.{edge}")
        else:
            allowed = ", ".join((*_SIZES, "size"))
            raise invalid(where, f"{where} is not allowed; these are: {allowed}", _UNSUPPORTED)


def _check_number(value: object, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_VALUE:
        raise invalid(where, f"{where} must be a whole number from 1 to {MAX_VALUE}")
