"""The encoder-cache connector that vLLM loads into its scheduler and worker processes.

A producer's worker writes each embedding into its service's staging folder; the service verifies and
publishes it. A consumer's scheduler finds an embedding by its pin, a file that the service put there before
it handed the request over, and its worker maps that file. Nothing here does network I/O or waits.

Configured by ``ec_connector_extra_config``: ``staging`` (producer) or ``pins`` (consumer), folders both. A
request names the keys to be found there in ``ec_transfer_params``, each with the fingerprint that its
embedding must have.
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

from epd_common.store.embedding import IntegrityError
from epd_vllm.embedding_io import map_tensor, read_header, write_staged

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
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
        self._pins = Path(config.get_from_extra_config("pins", ""))
        self._loads: set[str] = set()
        self._found: dict[str, bool] = {}
        self._unavailable: set[str] = set()
        self._resolver = PlaceholderMetadataResolver(vllm_config.model_config)

    # -- scheduler: consumer -------------------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item is pinned. One answer for a whole scheduling pass, so that all agree."""
        if not self.is_consumer:
            return False
        if identifier not in self._found:
            self._found[identifier] = (self._pins / identifier).exists()
        return self._found[identifier]

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """False if an item that is still to be read is unusable; the request then fails alone.

        Checking size, rows and fingerprint here, where one request can be refused, is what keeps a wrong
        file from raising in the worker, which would take the engine with it.
        """
        managed = request.ec_transfer_params or {}
        for feature in request.mm_features if self.is_consumer else ():
            position = feature.mm_position
            if feature.identifier not in managed:
                continue
            if position.offset + position.length <= num_computed_tokens:
                continue
            wanted = managed[feature.identifier]["fingerprint"]
            if reason := self._fault(feature.identifier, position.get_num_embeds(), wanted):
                logger.error("request %s: %s", request.request_id, reason)
                self._unavailable.add(request.request_id)
                return False
        return True

    def _fault(self, identifier: str, placeholders: int, fingerprint: str) -> str | None:
        try:
            header = read_header(self._pins / identifier)
        except FileNotFoundError:
            return f"embedding {identifier} is not pinned on this node"
        except IntegrityError as error:
            return error.message
        if header.rows != placeholders:
            return f"embedding {identifier} has {header.rows} rows for {placeholders} placeholders"
        if header.fingerprint != fingerprint:
            return f"embedding {identifier} was made by another model: {header.fingerprint}"
        return None

    def take_unavailable_requests(self) -> set[str]:
        taken, self._unavailable = self._unavailable, set()
        return taken

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
                for feature in request.mm_features
            ]
        self._loads.clear()
        self._found.clear()
        return step

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Report identifier and grid of each encoded item with the answer."""
        if not self.is_producer:
            return False, None
        return False, collect_ec_item_metadata(request.mm_features, self._resolver) or None

    # -- worker --------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, StepItems)
        for identifier in step.loads:
            if identifier not in encoder_cache:
                tensor = map_tensor(self._pins / identifier)
                encoder_cache[identifier] = tensor.to(_device())

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
            write_staged(self._staging, identifier, tensor)


def _device() -> torch.device:
    """The device of this worker's rank."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        return torch.device(current_platform.device_type, current_platform.current_device())
    return torch.device(current_platform.device_type)
