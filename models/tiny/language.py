"""What the random-weight checkpoints have in common: words, the language part's sizes, weights."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from models import checkpoint

HIDDEN = 128
VOCABULARY = 2048
_WEIGHT_STD = 0.2
"""Ten times the usual spread: at 0.02 the answer hardly depends on the media."""


def make_tokenizer(
    template: str, special_tokens: Sequence[str] = checkpoint.SPECIAL_TOKENS
) -> transformers.PreTrainedTokenizerFast:
    """Train the tokenizer on made-up words, with a model's own special tokens."""
    return checkpoint.make_tokenizer(
        _pseudo_english(), VOCABULARY, template, special_tokens=special_tokens
    )


def one_medium_template(mark: str) -> str:
    """Return ChatML with ``mark`` for every content part that is not text."""
    switch = f"{{%- set mark = '{mark}' -%}}\n"
    return switch + Path(__file__).with_name("one_medium.jinja").read_text(encoding="utf-8")


def text_config(tokenizer: transformers.PreTrainedTokenizerFast, **changes: Any) -> dict[str, Any]:
    """The configuration of a two-layer language part; ``rope`` adds to the rotary settings."""
    ids = checkpoint.special_ids(tokenizer)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
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


def fill(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerFast,
    seed: int,
) -> None:
    """Draw all matrices from ``seed``, and let the model speak only whole ASCII tokens.

    A zero row in the head never wins against the largest of two thousand random logits. So no
    special token ends an answer early, and no lone byte holds back a streamed piece of text.
    """
    generator = torch.Generator().manual_seed(seed)
    special = set(checkpoint.special_ids(tokenizer).values())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, _WEIGHT_STD, generator=generator)
        silent = [
            index
            for index in range(VOCABULARY)
            if index in special
            or not tokenizer.decode([index]).isascii()
            or not tokenizer.decode([index]).isprintable()
        ]
        model.get_output_embeddings().weight[silent] = 0.0


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
