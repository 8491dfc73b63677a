"""The files around the weights of a small checkpoint.

Tokenizer, chat template, processor and generation settings, as transformers and vLLM look for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, VISION_PAD = "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
SPECIAL_TOKENS = (
    END_OF_TEXT, TURN_START, TURN_END, VISION_START, VISION_END, VISION_PAD, IMAGE_PAD, VIDEO_PAD,
)  # fmt: skip

IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
"""CLIP's pixel statistics, the ones in Qwen2-VL's published processor configuration."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # Qwen2's pre-tokenizer: every digit stands alone


def chat_template(label_images: bool) -> str:
    """Return the template; with ``label_images`` the label ``#k`` follows image k."""
    switch = f"{{%- set label_images = {'true' if label_images else 'false'} -%}}\n"
    return switch + Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def make_tokenizer(
    corpus: Iterable[str],
    vocab_size: int,
    template: str,
    labels: Iterable[str] = (),
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
) -> transformers.PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most ``vocab_size`` entries, the special tokens included.

    Args:
        labels: become one token each wherever they stand in the text.
        special_tokens: with ``END_OF_TEXT`` and ``TURN_END`` among them.
    """
    labels = list(labels)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special_tokens) - len(labels),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    bpe.add_special_tokens([AddedToken(name, normalized=False) for name in special_tokens])
    bpe.add_tokens([AddedToken(label, normalized=False) for label in labels])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=TURN_END, pad_token=END_OF_TEXT, model_max_length=8192
    )
    tokenizer.chat_template = template
    return tokenizer


def special_ids(tokenizer: transformers.PreTrainedTokenizerFast) -> dict[str, int]:
    """Map every special token to its id."""
    added = tokenizer.added_tokens_decoder
    return {token.content: index for index, token in added.items() if token.special}


def save_weights(
    model: transformers.PreTrainedModel, out: Path, prefixes: Mapping[str, str] | None = None
) -> None:
    """Write weights and model configuration; anyone may read them, whoever wrote them.

    Args:
        prefixes: how names begin in the checkpoints that the model's makers published, by how they
            begin in transformers; for models of which vLLM knows the published names alone.
    """
    model.save_pretrained(out)
    if prefixes:
        weights = {_renamed(name, prefixes): value for name, value in model.state_dict().items()}
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    for path in out.glob("*.safetensors"):
        path.chmod(0o644)


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    for prefix, published in prefixes.items():
        if name.startswith(prefix):
            return published + name.removeprefix(prefix)
    raise ValueError(f"no published name is known for {name}")


def write_side_files(
    out: Path,
    tokenizer: transformers.PreTrainedTokenizerFast,
    *,
    processor_class: str,
    video_processor_type: str,
    patch_size: int,
    max_pixels: int,
) -> None:
    """Write everything but weights and model configuration of a Qwen vision-language model."""
    tokenizer.save_pretrained(out)
    write_generation_config(out, tokenizer)
    pixels = {"shortest_edge": 56 * 56, "longest_edge": max_pixels}
    processor = {
        "processor_class": processor_class,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
        "size": pixels,
        "min_pixels": pixels["shortest_edge"],
        "max_pixels": pixels["longest_edge"],
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": IMAGE_MEAN,
        "image_std": IMAGE_STD,
    }
    _write_json(
        out / "preprocessor_config.json",
        processor | {"image_processor_type": "Qwen2VLImageProcessor"},
    )
    _write_json(
        out / "video_preprocessor_config.json",
        processor | {"video_processor_type": video_processor_type},
    )
    template_file = out / "chat_template.jinja"
    template_file.write_text(str(tokenizer.chat_template), encoding="utf-8")


def write_generation_config(out: Path, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    """Greedy unless the request says otherwise, up to the end of the turn."""
    ids = special_ids(tokenizer)
    _write_json(
        out / "generation_config.json",
        {
            "bos_token_id": ids[END_OF_TEXT],
            "eos_token_id": [ids[TURN_END], ids[END_OF_TEXT]],
            "pad_token_id": ids[END_OF_TEXT],
            "do_sample": False,
        },
    )


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
