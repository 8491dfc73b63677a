"""The beginnings of a request's prompt, on their way from the service to the engine's scheduler.

A context variable connects the call of the application with the request that it makes, far below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from epd_common.beginnings import Beginning

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

BEGINNINGS: ContextVar[Sequence[Beginning]] = ContextVar("epd_beginnings", default=())
"""Those of the request in whose task this is read."""

_ARGUMENT = "epd_beginnings"


def attach(params: SamplingParams) -> None:
    """Give the engine the beginnings of the request with these parameters: the share that each has of it."""
    if beginnings := BEGINNINGS.get():
        shares = {named.key: named.share for named in beginnings}
        params.extra_args = {**(params.extra_args or {}), _ARGUMENT: shares}


def ends_of(request: Request) -> dict[str, int]:
    """The tokens of each beginning of a request, by their keys."""
    extra: dict[str, Any] = getattr(request.sampling_params, "extra_args", None) or {}
    shares: dict[str, float] = extra.get(_ARGUMENT) or {}
    return {key: int(share * request.num_prompt_tokens) for key, share in shares.items()}
