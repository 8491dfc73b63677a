"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "wrong"]
"""``note``: it may be meant so, or could not be looked at."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of ``epd doctor``.

    Attributes:
        name: What was looked at.
        said: What was found there.
        advice: What to do; empty where all is well.
    """

    name: str
    state: State
    said: str
    advice: str = ""


def size(count: float) -> str:
    """Bytes as people write them, e.g. ``64 MiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
