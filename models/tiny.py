"""Random-weight Qwen2.5-VL and Qwen3-VL checkpoints of about 1 M parameters, built in seconds.

Their answers mean nothing but are a fixed function of the prompt and the pictures, so two ways of
serving them can be compared token by token. Qwen3-VL brings DeepStack: its image embeddings are
wider than the hidden size, one more slice for every tapped vision layer.

    python -m models.tiny --arch qwen3_vl --out tiny-qwen3-vl
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from epd_vllm.compat import prepare_environment
from models import checkpoint

ARCHITECTURES = ("qwen2_5_vl", "qwen3_vl")
HIDDEN = 128
VOCABULARY = 2048
_WEIGHT_STD = 0.2
"""Ten times the usual spread: at 0.02 the answer hardly depends on the pictures."""


def build(arch: str, out: Path, seed: int = 0) -> None:
    """Write a random-weight checkpoint into ``out``.

    Args:
        arch: one of ``ARCHITECTURES``.
        out: folder for the checkpoint, made if missing.
        seed: of the weights; the tokenizer is always the same.

    Raises:
        ValueError: an unknown architecture.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    prepare_environment()
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = checkpoint.make_tokenizer(
        _pseudo_english(), VOCABULARY, checkpoint.chat_template(label_images=False)
    )
    model = _qwen2_5(tokenizer) if arch == "qwen2_5_vl" else _qwen3(tokenizer)
    _fill(model, tokenizer, seed)
    checkpoint.save_weights(model, out)
    checkpoint.write_side_files(
        out,
        tokenizer,
        processor_class="Qwen2_5_VLProcessor" if arch == "qwen2_5_vl" else "Qwen3VLProcessor",
        video_processor_type=(
            "Qwen2VLVideoProcessor" if arch == "qwen2_5_vl" else "Qwen3VLVideoProcessor"
        ),
        patch_size=14 if arch == "qwen2_5_vl" else 16,
        max_pixels=512 * 512,
    )


def _pseudo_english() -> Iterator[str]:
    """Yield made-up ASCII sentences: a corpus that is the same on every machine."""
    rng = random.Random(0)
    onsets = ("b", "ch", "d", "f", "g", "h", "l", "m", "n", "p", "r", "s", "st", "t", "w", "")
    vowels = ("a", "e", "i", "o", "u", "ea", "ou")
    codas = ("", "n", "r", "s", "t", "ll", "nd", "ck")
    syllables = [onset + vowel + coda for onset in onsets for vowel in vowels for coda in codas]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(3000)]
    for _ in range(2000):
        yield " ".join(rng.choices(words, k=12)).capitalize() + "."


def _text(tokenizer: transformers.PreTrainedTokenizerFast, **changes: Any) -> dict[str, Any]:
    ids = checkpoint.special_ids(tokenizer)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "bos_token_id": ids[checkpoint.END_OF_TEXT],
        "eos_token_id": ids[checkpoint.TURN_END],
        "pad_token_id": ids[checkpoint.END_OF_TEXT],
        "rope_parameters": rope | changes.pop("rope", {}),
        **changes,
    }


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


def _qwen2_5(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.PreTrainedModel:
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 14,
        "out_hidden_size": HIDDEN,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    text = _text(tokenizer)
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, **_markers(tokenizer)
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.PreTrainedModel:
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1],
    }
    text = _text(tokenizer, head_dim=64, rope={"mrope_interleaved": True})
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=vision, **_markers(tokenizer)
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def _fill(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerFast,
    seed: int,
) -> None:
    """Draw all matrices from ``seed``, and let the model speak only whole ASCII tokens.

    A zero row in the head never wins against the largest of two thousand random logits. So no
    special token ends an answer early, and no lone byte holds back a streamed piece of text.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, _WEIGHT_STD, generator=generator)
        silent = [
            index
            for index in range(VOCABULARY)
            if index in tokenizer.all_special_ids
            or tokenizer.convert_ids_to_tokens(index) in checkpoint.SPECIAL_TOKENS
            or not tokenizer.decode([index]).isascii()
            or not tokenizer.decode([index]).isprintable()
        ]
        model.lm_head.weight[silent] = 0.0


def main() -> None:
    """Build one checkpoint from the command line."""
    parser = argparse.ArgumentParser(description="Build a random-weight checkpoint.")
    parser.add_argument("--arch", choices=ARCHITECTURES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    build(options.arch, options.out, options.seed)
    total_bytes = sum(path.stat().st_size for path in options.out.iterdir())
    print(f"{options.arch}: {total_bytes / 1e6:.1f} MB in {options.out}")


if __name__ == "__main__":
    main()
