"""Whether a receipt can be what it says: it comes over the bus, is kept for a while, and is shown as JSON,
which knows neither NaN nor infinity.
"""

from __future__ import annotations

import msgspec

from epd_common.protocol import Receipt

MOST_COUNT = 2**53
"""Of tokens, rows or bytes: all JSON's readers can tell it from its neighbours."""

MOST_S = 1e7
"""Seconds from a job's first moment to any other; no job lives for as long."""

MOST_CHARACTERS = 256
"""Of a name or a key."""


def credible(receipt: Receipt, *, items: int) -> bool:
    """Whether its times and names can be, and it tells of no more items than the request has.

    With a prefill worker's receipt in it that must be so as well: by that one's times the whole is placed.
    """
    if len(receipt.items) > items:
        return False
    if receipt.prefill is not None and not _has_prefilled(receipt.prefill, items):
        return False
    return all(
        _credible(value)
        for part in (receipt, *receipt.items)
        for value in msgspec.structs.astuple(part)
    )


def _has_prefilled(receipt: Receipt, items: int) -> bool:
    """Whether it is the credible receipt of a worker that had all items, prefilled, and then handed over."""
    if receipt.prefill is not None or len(receipt.items) != items or receipt.first_s is None:
        return False
    return 0 <= receipt.first_s <= receipt.ended_s and credible(receipt, items=items)


def _credible(value: object) -> bool:
    match value:
        case int():
            return abs(value) <= MOST_COUNT
        case str():
            return len(value) <= MOST_CHARACTERS
        case float():
            return abs(value) <= MOST_S  # what is no number is not
        case _:
            return True
