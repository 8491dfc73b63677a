"""Whether a request may enter an engine before all its items are there. Pure policy."""

from __future__ import annotations

TEXT_WORTH_PREFILLING = 64
"""Characters before the first item from which it pays to begin without that item."""


def may_enter_early(*, sized: bool, first_is_here: bool, text_before: int) -> bool:
    """Whether an incomplete request has something to prefill.

    Args:
        sized: The room that each of its items takes in the prompt is known.
        first_is_here: The first item of the prompt is.
        text_before: Characters before that item.
    """
    return sized and (first_is_here or text_before >= TEXT_WORTH_PREFILLING)
