"""Text of others on the operator's terminal: shown as it is, and nothing in it is carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


def visible(text: str, *, keep: str = "") -> str:
    r"""The text with what a terminal would obey (ESC, line ends, turned writing) as escapes, e.g. ``\x1b``.

    Args:
        keep: Characters that stay as they are.
    """
    return "".join(
        each
        if each.isprintable() or each in keep
        else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )


def cell(text: str) -> Text:
    """The text for one of rich's tables, whose markup in brackets is text as well."""
    from rich.text import Text  # images of the services have no rich, and show errors all the same

    return Text(visible(text))
