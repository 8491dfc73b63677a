"""Whether a model can take a prompt at all, as far as that is certain before anything is encoded. No I/O.

What is known is a lower bound: rows of media whose size was seen before. Text counts as nothing, for what
a template makes of it, and how long a token may be, only the worker knows. So whoever passes may still be
refused by the engine, and whoever is refused here would be.
"""

from __future__ import annotations

from collections.abc import Sequence

from epd_common.ingest.parts import invalid


def check_fits(
    shown: Sequence[int],
    rows: Sequence[int | None],
    *,
    max_model_len: int,
    max_item_rows: int,
    place: str = "messages",
) -> None:
    """Refuse media that cannot be in one prompt of the model.

    Args:
        shown: Numbers of the items that the request shows, each as often as it does.
        rows: Of each item; None where they are not known.
        max_model_len: Tokens of a prompt and its answer, at most; 0 where that is not known.
        max_item_rows: Rows of one item, at most; 0 where that is not known.
        place: The field that makes the prompt.

    Raises:
        BadRequestError: ``item_too_large`` or ``prompt_too_long``.
    """
    for number, known in enumerate(rows):
        check_item_fits(known or 0, f"items[{number}]", max_item_rows=max_item_rows)
    certain = sum(rows[number] or 1 for number in shown)
    if max_model_len and certain >= max_model_len:
        raise invalid(
            place,
            f"the prompt's media alone take {certain} tokens, and this model takes {max_model_len}, its "
            "answer included; send fewer or smaller ones",
            "prompt_too_long",
        )


def check_item_fits(rows: int, place: str, *, max_item_rows: int) -> None:
    """Refuse an item that the engine's encoder cache could never hold.

    Raises:
        BadRequestError: ``item_too_large``.
    """
    if max_item_rows and rows > max_item_rows:
        raise invalid(
            place,
            f"{place} has {rows} rows, and the engine's encoder cache holds {max_item_rows}; send it smaller",
            "item_too_large",
        )
