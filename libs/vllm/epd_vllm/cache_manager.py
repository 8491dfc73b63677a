"""vLLM's encoder-cache manager with a gate: no room for an item whose embedding is not there.

The scheduler takes that for a full cache and prefills up to the item's start, and goes on from there in a
later step. Loaded by ``--ec-manager-config``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from epd_vllm.gate import Gate

if TYPE_CHECKING:
    from vllm.v1.request import Request


class GatedEncoderCacheManager(EncoderCacheManager):
    """The scheduler of this package sets ``gate``."""

    gate: Gate | None = None

    def can_allocate(
        self,
        request: Request,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        if self.gate is not None and self.gate.holds_back(request, input_id):
            return False
        return bool(
            super().can_allocate(request, input_id, encoder_compute_budget, num_embeds_to_schedule)
        )
