"""The encoder-cache connector that vLLM loads into its scheduler and worker processes.

A producer's worker writes each embedding into its service's staging folder; the service verifies and
publishes it. A consumer's scheduler finds an embedding by its pin, a file that the service puts there as soon
as the embedding is on the node, and its worker maps that file. Nothing here does network I/O or waits, but
for the arena's lock where its file system is full.

As ``ec_both`` it is a producer to requests that bring media, and a consumer to those that name keys in
``ec_transfer_params``.

Configured by ``ec_connector_extra_config``: ``staging`` (producer) and ``pins`` (consumer), folders both;
``kept_pipe`` (consumer) is for the scheduler.
Which items of a request may be scheduled is for the ``Gate`` to say.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

from epd_common.store.base import StoreFullError
from epd_vllm.embedding_io import device, map_tensor, mark_refused, write_staged
from epd_vllm.gate import Gate
from epd_vllm.model import dtype_name, embedding_width

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class StepItems(ECConnectorMetadata):
    """What the workers do in one engine step: identifiers to load, and to save if they hold them."""

    loads: list[str] = field(default_factory=list)
    saves: list[str] = field(default_factory=list)


class EpdConnector(ECConnectorBase):
    """See the module's text. One instance lives in the scheduler's process, one in each worker's."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        config = vllm_config.ec_transfer_config
        self._staging = Path(config.get_from_extra_config("staging", ""))
        model = vllm_config.model_config
        self._dtype: torch.dtype = model.dtype
        self.gate = Gate(
            Path(config.get_from_extra_config("pins", "")),
            width=embedding_width(model),
            dtype=dtype_name(model),
        )
        self.sleep_when_stalled: bool = config.get_from_extra_config("sleep_when_stalled", True)
        self.kept_pipe: str = config.get_from_extra_config("kept_pipe", "")
        self._loads: set[str] = set()
        self._resolver = PlaceholderMetadataResolver(vllm_config.model_config)

    # -- scheduler: consumer -------------------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        return self.is_consumer and self.gate.pinned(identifier)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return not self.is_consumer or self.gate.admits(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        return self.gate.take_unavailable()

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        identifier = request.mm_features[index].identifier
        if self.has_cache_item(identifier):
            self._loads.add(identifier)

    # -- scheduler: both -----------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepItems:
        step = StepItems(loads=sorted(self._loads))
        if self.is_producer:
            # An item in the engine's own cache is not encoded again, so save_caches is not called for it.
            step.saves = [
                feature.identifier
                for request in scheduler_output.scheduled_new_reqs
                if not _consumes(request)
                for feature in request.mm_features
            ]
        self._loads.clear()
        self.gate.new_pass()
        return step

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """A producer reports identifier and grid of each encoded item with the answer."""
        self.gate.forget(request.request_id)
        if not self.is_producer or request.ec_transfer_params:
            return False, None
        return False, collect_ec_item_metadata(request.mm_features, self._resolver) or None

    # -- worker --------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, StepItems)
        for identifier in step.loads:
            if identifier not in encoder_cache:
                tensor = map_tensor(self.gate.path(identifier))
                encoder_cache[identifier] = tensor.to(device())
                if (
                    identifier in step.saves
                ):  # to be encoded for others, and pinned here for a request
                    self._save(identifier, tensor)

    def start_save_caches(self, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, StepItems)
        encoder_cache: dict[str, torch.Tensor] = kwargs.get("encoder_cache") or {}
        for identifier in step.saves:
            if identifier in encoder_cache:
                self._save(identifier, encoder_cache[identifier])

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        if self.is_producer:
            self._save(mm_hash, encoder_cache[mm_hash])

    def _save(self, identifier: str, tensor: torch.Tensor) -> None:
        if not (self._staging / identifier).exists():
            try:
                # vLLM casts it when it is merged into the prompt; before that, one dtype for all.
                write_staged(self._staging, identifier, tensor.to(self._dtype))
            except StoreFullError as error:  # which must not end the engine
                logger.error("the embedding of item %s is lost: %s", identifier, error)
                mark_refused(self._staging, identifier)


def _consumes(request: NewRequestData) -> bool:
    """Whether a request waits for embeddings from elsewhere, rather than to be encoded."""
    arguments = (request.sampling_params and request.sampling_params.extra_args) or {}
    return bool(arguments.get("ec_transfer_params"))
