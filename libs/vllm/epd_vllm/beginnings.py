"""The beginnings of a request's prompt, on their way from the service to the engine's scheduler.

A context variable connects the call of the application with the request that it makes, far below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from epd_common.beginnings import Beginning

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request

BEGINNINGS: ContextVar[Sequence[Beginning]] = ContextVar("epd_beginnings", default=())
"""Those of the request in whose task this is read."""

_ARGUMENT = "epd_beginnings"


def attach(request: EngineCoreRequest) -> None:
    """Give the engine the beginnings of a request, with the tokens that each of them has."""
    beginnings = BEGINNINGS.get()
    if not beginnings or not request.prompt_token_ids or request.sampling_params is None:
        return
    tokens = len(request.prompt_token_ids)
    ends = {named.key: int(named.share * tokens) for named in beginnings}
    request.sampling_params.extra_args = {
        **(request.sampling_params.extra_args or {}),
        _ARGUMENT: ends,
    }


def ends_of(request: Request) -> dict[str, int]:
    """The tokens of each beginning of a request, by their keys."""
    extra: dict[str, Any] = getattr(request.sampling_params, "extra_args", None) or {}
    ends: dict[str, int] = extra.get(_ARGUMENT) or {}
    return ends
