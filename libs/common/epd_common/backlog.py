"""How much a PD worker has before it, in tokens to be prefilled. Pure policy.

Of the workers that wait for a job the least loaded one gets it. By the number of its jobs, ten answers that
are half told would count as much as ten requests of ten pictures each, which keep a worker busy for seconds:
whoever comes behind them waits for his first token. So what counts is the prompts that are not prefilled yet,
those among them too that wait for their embeddings, since these are going to be prefilled here.
"""

from __future__ import annotations

import bisect

DECODING_TOKENS = 64
"""What an answer that is being told counts: it slows every step down a little."""

_LEVELS = (1, 512, 1_024, 2_048, 4_096, 8_192, 12_288, 20_480, 40_960)
"""Tokens from which on a worker counts as more loaded; NATS has ten levels."""


class Share:
    """What one request adds to a backlog: its prompt, and once that is prefilled its answer."""

    def __init__(self, backlog: Backlog, tokens: int) -> None:
        self._backlog = backlog
        self._tokens = 0
        self._prefilled = False
        self._set(tokens)

    def estimate(self, tokens: int) -> None:
        """The prompt has so many tokens, as is known by now."""
        if not self._prefilled:
            self._set(tokens)

    def prefilled(self) -> None:
        """The first token of the answer is there."""
        if not self._prefilled:
            self._prefilled = True
            self._set(DECODING_TOKENS)

    def end(self) -> None:
        """The request has ended."""
        self._prefilled = True
        self._set(0)

    def _set(self, tokens: int) -> None:
        self._backlog.tokens += tokens - self._tokens
        self._tokens = tokens


class Backlog:
    """Of one worker.

    Attributes:
        tokens: What is before it.
    """

    def __init__(self) -> None:
        self.tokens = 0

    def add(self, tokens: int) -> Share:
        """A request with a prompt of about so many tokens has come."""
        return Share(self, tokens)

    @property
    def level(self) -> int:
        """How loaded the worker is, from 0 to 9."""
        return bisect.bisect_right(_LEVELS, self.tokens)
