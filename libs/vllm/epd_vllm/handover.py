"""Prefill here and decode elsewhere: what a request says of it to vLLM, and what its outputs say back.

vLLM's KV connectors take their orders from ``kv_transfer_params`` of a request, and leave there what another
engine needs. A context variable connects the call of the application with the engine far below it, as for
:mod:`epd_vllm.tape`; so this is the same for every route and for streams.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from epd_common.engines import Loaded

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.metrics.stats import PrefillStats

NOTES: ContextVar[HandoverNotes | None] = ContextVar("epd_handover", default=None)
"""Those of the request in whose task this is read; None where nothing is handed over."""

ASK: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What asks a connector to keep the prompt's keys and values for another engine."""

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_OF_THE_ANSWER = ("stream", "stream_options", "min_tokens", *_LIMITS)


class HandoverNotes:
    """What the outputs of one request say.

    Attributes:
        params: Those that another engine needs, once there are some.
        lost: The engine could not load what it was to load.
    """

    def __init__(self, loaded: Loaded | None = None) -> None:
        self.params: dict[str, Any] | None = None
        self.lost = False
        self._loaded = loaded
        self._began = False

    def note(self, output: RequestOutput) -> None:
        """An output is about to be handed to the serving code."""
        if output.kv_transfer_params:
            self.params = output.kv_transfer_params
        completion = output.outputs[0] if output.outputs else None
        if not self._began and completion is not None and completion.finish_reason == "error":
            self.lost = True
        self._began = True

    def prefilled(self, stats: PrefillStats) -> None:
        """The engine has the whole prompt. What an output says of it counts what its prefill worker had."""
        if self._loaded is not None:
            self._loaded.loaded_tokens = stats.num_cached_tokens


def prefill_only(body: dict[str, Any], limit: str) -> dict[str, Any]:
    """The body of a request for the prompt alone: its answer has one token, which nobody sees.

    Args:
        limit: The route's name for the most tokens of an answer.
    """
    kept = {name: value for name, value in body.items() if name not in _OF_THE_ANSWER}
    return kept | {limit: 1, "kv_transfer_params": dict(ASK)}
