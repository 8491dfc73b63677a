"""The tokens of one streamed answer, as vLLM's serving code takes them from the engine.

The serving code asks for an output, makes events of it, sends them, and only then asks for the next; so what
was noted since the last piece of the body belongs to the next piece. A context variable connects the call of
the application with the engine far below it.
"""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar
from typing import Any

from epd_common.engines import AnswerPiece, Told

TAPE: ContextVar[Tape | None] = ContextVar("epd_tape", default=None)
"""That of the request in whose task this is read; None where nobody wants to know."""


class Tape:
    """Notes the tokens of an answer.

    Args:
        told: What was told already, to be made again.
    """

    def __init__(self, told: Told | None) -> None:
        self._tokens: list[int] = []
        self._finish = ""
        groups = [group for group in told.tokens if group] if told is not None else []
        self.to_tell = deque(groups)
        """Tokens of the outputs to be made again, one group an output."""
        self.told_finish = told.finish if told is not None and groups else ""
        """How the last of them ended the answer, if it did."""
        self.telling = ""
        """The engine's name of the request, while there is something to be made again."""
        self.rest: Any = None
        """The request as the engine gets it after that; None if it was ended already."""

    def note(self, tokens: list[int], finish: str) -> None:
        """An output is handed to the serving code."""
        self._tokens += tokens
        self._finish = finish

    def piece(self, data: bytes) -> AnswerPiece:
        """A piece of the body, with what was noted since the last one."""
        tokens, self._tokens = tuple(self._tokens), []
        finish, self._finish = self._finish, ""
        return AnswerPiece(data, tokens, finish)
