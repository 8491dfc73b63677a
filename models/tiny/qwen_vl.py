"""Qwen2.5-VL and Qwen3-VL, for pictures and videos.

Qwen3-VL brings DeepStack: its embeddings are wider than the hidden size, one more slice for every
tapped vision layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from models import checkpoint
from models.tiny import language

_MAX_PIXELS = 512 * 512


def build_2_5(out: Path, seed: int) -> None:
    """Write a Qwen2.5-VL with window attention in one of two vision layers."""
    tokenizer = _tokenizer()
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 14,
        "out_hidden_size": language.HIDDEN,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    text = language.text_config(tokenizer, rope={"mrope_section": [8, 12, 12]})
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, **_markers(tokenizer)
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    language.fill(model, tokenizer, seed)
    checkpoint.save_weights(model, out)
    checkpoint.write_side_files(
        out,
        tokenizer,
        processor_class="Qwen2_5_VLProcessor",
        video_processor_type="Qwen2VLVideoProcessor",
        patch_size=14,
        max_pixels=_MAX_PIXELS,
    )


def build_3(out: Path, seed: int) -> None:
    """Write a Qwen3-VL with DeepStack from two of three vision layers."""
    tokenizer = _tokenizer()
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "out_hidden_size": language.HIDDEN,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
    }
    rope = {"mrope_section": [8, 12, 12], "mrope_interleaved": True}
    text = language.text_config(tokenizer, head_dim=64, rope=rope)
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=vision, **_markers(tokenizer)
    )
    model = transformers.Qwen3VLForConditionalGeneration(config)
    language.fill(model, tokenizer, seed)
    checkpoint.save_weights(model, out)
    checkpoint.write_side_files(
        out,
        tokenizer,
        processor_class="Qwen3VLProcessor",
        video_processor_type="Qwen3VLVideoProcessor",
        patch_size=16,
        max_pixels=_MAX_PIXELS,
    )


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    return language.make_tokenizer(checkpoint.chat_template(label_images=False))


def _markers(tokenizer: transformers.PreTrainedTokenizerFast) -> dict[str, Any]:
    ids = checkpoint.special_ids(tokenizer)
    return {
        "image_token_id": ids[checkpoint.IMAGE_PAD],
        "video_token_id": ids[checkpoint.VIDEO_PAD],
        "vision_start_token_id": ids[checkpoint.VISION_START],
        "vision_end_token_id": ids[checkpoint.VISION_END],
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
