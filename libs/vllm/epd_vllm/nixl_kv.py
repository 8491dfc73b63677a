"""vLLM's NIXL connector with an agent that leaves the processor alone while nothing is to be moved.

NIXL's agent has a thread that looks for what others ask of it, and by its Python interface without any pause:
a whole core of each engine's, for nothing. Nor does vLLM's connector let anybody change that. Loaded by
``--kv-transfer-config``, in the processes of an engine alone.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

PAUSE_US = 200
"""Microseconds between two looks. Others wait for one only when they first connect."""


def _slow_down() -> None:
    """Have agents that are made from now on pause between their looks."""
    from nixl import _api

    bindings: Any = _api.nixlBind
    original = bindings.nixlAgentConfig
    if getattr(original, "pauses", False):
        return

    class PausingConfig(original):  # type: ignore[misc, valid-type]
        """The interface sets the pause to none after it was made; so that is what it cannot set."""

        pauses = True

        @property
        def pthrDelay(self) -> int:
            delay: int = original.pthrDelay.__get__(self)
            return delay

        @pthrDelay.setter
        def pthrDelay(self, value: int) -> None:
            original.pthrDelay.__set__(self, max(value, PAUSE_US))

    bindings.nixlAgentConfig = PausingConfig


class QuietNixlConnector(NixlConnector):
    """See the module's text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _slow_down()
        super().__init__(*args, **kwargs)
