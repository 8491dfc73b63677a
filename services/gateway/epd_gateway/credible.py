"""Whether a receipt can be what it says: it comes over the bus, is kept for a while, and is shown as JSON,
which knows neither NaN nor infinity.
"""

from __future__ import annotations

import msgspec

from epd_common.protocol import Receipt

MOST_S = 1e7
"""Seconds from a job's first moment to any other; no job lives for as long."""

MOST_CHARACTERS = 256
"""Of a name or a key."""


def credible(receipt: Receipt, *, items: int) -> bool:
    """Whether its times and names can be, and it tells of no more items than the request has."""
    if len(receipt.items) > items:
        return False
    return all(
        _credible(value)
        for part in (receipt, *receipt.items)
        for value in msgspec.structs.astuple(part)
    )


def _credible(value: object) -> bool:
    match value:
        case str():
            return len(value) <= MOST_CHARACTERS
        case float():
            return abs(value) <= MOST_S  # what is no number is not
        case _:
            return True
