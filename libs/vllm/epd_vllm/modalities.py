"""Which media a model takes, and what must be known of an item in place of its bytes."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from epd_common.protocol.jobs import Modality

if TYPE_CHECKING:
    from vllm.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Modalities:
    """The modalities of a model.

    Attributes:
        by_metadata: Those of which a decoder needs metadata alone, e.g. ``image_grid_thw``.
        raw: Those for which vLLM knows no metadata: a decoder must have the media themselves, to find out
            how much room they take. It does not encode them all the same.
    """

    by_metadata: tuple[str, ...]
    raw: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return self.by_metadata + self.raw


def modalities_of(config: ModelConfig, *, allowed: bool = False) -> Modalities:
    """The modalities of a model whose engine was or will be started with this configuration.

    Args:
        allowed: Leave out those for which ``--limit-mm-per-prompt`` is 0.
    """
    from vllm.multimodal import MULTIMODAL_REGISTRY

    if not config.is_multimodal_model:
        return Modalities((), ())
    info = MULTIMODAL_REGISTRY.create_processor(config).info
    limits = info.allowed_mm_limits if allowed else info.supported_mm_limits
    known = [name for name in get_args(Modality) if limits.get(name, 0) != 0]
    by_metadata = [name for name in known if info.data_parser.placeholder_metadata_fields(name)]
    return Modalities(tuple(by_metadata), tuple(name for name in known if name not in by_metadata))


def model_config(parsed: Namespace) -> ModelConfig:
    """The model's configuration as an engine with these arguments will have it."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs.from_cli_args(parsed).create_model_config()
