"""What PD workers say of their prefix caches, on ``epd.v1.held.<worker>``."""

from __future__ import annotations

from epd_common.protocol.base import Message


class Held(Message, tag="held", frozen=True, kw_only=True):
    """Which beginnings of prompts a PD worker's cache holds; a hint, by which nothing but places is chosen.

    ``epoch`` is the start of the worker's process, in milliseconds since the Unix epoch. ``seq`` counts the
    messages of an epoch, from 0: who missed one knows nothing of this worker until the next ``whole`` one,
    which names all that is held in ``keys``. Others name what is new there, and what is gone in ``gone``.
    """

    worker: str
    epoch: int
    seq: int
    whole: bool = False
    keys: list[str] = []
    gone: list[str] = []
