"""What must be known of a checkpoint before and after an engine loads it."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd_common.checkpoint import faults
from epd_common.engines import EngineInfo
from epd_common.errors import EpdError
from epd_vllm.compat import vllm_version
from epd_vllm.fingerprint import model_fingerprint
from epd_vllm.modalities import Modalities

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.engine.async_llm import AsyncLLM


GRID_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Types of models of which each picture and video has the rows that its grid says; those that are tested."""


class ModelNotFoundError(EpdError):
    """There is no checkpoint of that name."""

    default_code = "model_missing"


def model_folder(model: str) -> Path:
    """The folder of a checkpoint: a local path, or where the hub's cache has it.

    Raises:
        ModelNotFoundError: neither is there.
    """
    if (Path(model) / "config.json").exists():
        return Path(model)
    if Path(model).is_absolute() or Path(model).is_dir():
        raise ModelNotFoundError(
            f"there is no model in {model!r}: it has no config.json; set EPD_MODEL (compose: EPD_MODEL_DIR) "
            "to a checkpoint's folder"
        )
    from transformers.utils.hub import cached_file

    try:
        return Path(str(cached_file(model, "config.json"))).parent
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"the model {model!r} is neither a folder with a config.json nor a model that the hub gives "
            f"({str(error).splitlines()[0]}); check EPD_MODEL"
        ) from error


def check_model(model: str, engine_args: str) -> Path:
    """The folder of a checkpoint; one that lies here must be whole, as the hub's are when they are loaded.

    Raises:
        ModelNotFoundError: there is none, or files are missing or cut short.
    """
    folder = model_folder(model)
    if folder == Path(model) and (found := faults(folder, engine_args)):
        raise ModelNotFoundError(
            f"the model in {folder} is not whole: {'; '.join(found[:3])}; copy or download it again"
        )
    return folder


def needs_vision_tower(folder: Path) -> bool:
    """Whether PD must load the vision tower.

    DeepStack models (Qwen3-VL) split the embedding in code that belongs to the tower's module.
    """
    config = json.loads((folder / "config.json").read_text())
    return bool(config.get("vision_config", {}).get("deepstack_visual_indexes"))


def describe(
    engine: AsyncLLM,
    *,
    model: str,
    served: str,
    revision: str,
    modalities: Modalities,
    encodes: bool,
) -> EngineInfo:
    """What the loaded engine is, for the registry and for keys."""
    config = engine.model_config
    folder = model_folder(model)
    dtype, width = dtype_name(config), embedding_width(config)
    version, is_cpu = vllm_version()
    special = _special_tokens(engine.get_tokenizer())
    return EngineInfo(
        model=served,
        fingerprint=model_fingerprint(folder, revision=revision, dtype=dtype, width=width),
        modalities=modalities.all,
        raw_modalities=modalities.raw,
        max_model_len=config.max_model_len,
        special_tokens=tuple(special),
        special_token_ids=tuple(special.values()),
        # What vLLM's scheduler computes from the same configuration. Only engines with a cache have one.
        max_item_rows=engine.input_processor.mm_encoder_cache_size,
        encodes=encodes,
        width=width,
        dtype=dtype,
        merge=merge_size(config),
        versions={
            "vllm": version + ("+cpu" if is_cpu else ""),
            "torch": importlib.metadata.version("torch"),
            "epdflow": importlib.metadata.version("epdflow"),
        },
    )


def dtype_name(config: ModelConfig) -> str:
    """The dtype of a model's embeddings, e.g. ``bfloat16``."""
    return str(config.dtype).removeprefix("torch.")


def embedding_width(config: ModelConfig) -> int:
    """Values in one row of an embedding: the language model's width, and as many again for each layer of the
    tower that DeepStack taps."""
    vision = getattr(config.hf_config, "vision_config", None)
    taps = getattr(vision, "deepstack_visual_indexes", None) or ()
    return int(config.get_inputs_embeds_size()) * (1 + len(taps))


def merge_size(config: ModelConfig) -> int:
    """Patches along each edge of what becomes a row; 0 where that is not known, or not all rows are kept."""
    if config.hf_config.model_type not in GRID_MODELS:
        return 0
    if getattr(config.multimodal_config, "video_pruning_rate", None):
        return 0
    return int(config.hf_config.vision_config.spatial_merge_size)


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Tokens with a meaning to a chat template or the engine, and their ids: no client may give them."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    named = {token.content for token in added if token.special}
    names = sorted(named | set(getattr(tokenizer, "all_special_tokens", ())))
    return {name: int(tokenizer.convert_tokens_to_ids(name)) for name in names}
