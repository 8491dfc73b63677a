"""A request's priority inside the engine: its own first, then by age, where long prompts count as younger.

Pure policy. vLLM serves the lowest priority first, and equal ones as they came. With age alone a prompt of
many pictures holds up all short ones behind it; with its length alone it might never be served. So a prompt
counts as younger by a time in proportion to its length.
"""

from __future__ import annotations

LONG_PROMPT = 16_384
"""Tokens."""

_STEPS_A_SECOND = 100
_SPAN = 10**12
"""More steps than time has, and little enough for 64 bits with any priority."""


def engine_priority(
    priority: int, *, published: float, prompt_tokens: int, long_wait_s: float
) -> int:
    """The priority to give an engine.

    Args:
        priority: What the client asked for, from -999,999 to 999,999.
        published: When the request was published, in seconds, by the broker's clock.
        prompt_tokens: Of its whole prompt, as far as that is known.
        long_wait_s: So much longer a prompt of ``LONG_PROMPT`` tokens waits than an empty one, at most, where
            they cannot both be served; longer ones wait no longer.
    """
    due = published + long_wait_s * min(prompt_tokens / LONG_PROMPT, 1.0)
    return priority * _SPAN + int(due * _STEPS_A_SECOND)
