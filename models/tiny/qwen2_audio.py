"""Qwen2-Audio, for sound: 25 tokens a second of it, up to 30 s."""

from __future__ import annotations

from pathlib import Path

import transformers

from models import checkpoint
from models.tiny import language

AUDIO, AUDIO_START, AUDIO_END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
_MEL_BINS = 32
_PUBLISHED = {
    "model.audio_tower.": "audio_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}


def build(out: Path, seed: int) -> None:
    """Write a Qwen2-Audio with two audio layers; its frames are those of every Whisper model."""
    tokenizer = language.make_tokenizer(
        language.one_medium_template(AUDIO_START + AUDIO + AUDIO_END),
        (
            checkpoint.END_OF_TEXT,
            checkpoint.TURN_START,
            checkpoint.TURN_END,
            AUDIO,
            AUDIO_START,
            AUDIO_END,
        ),
    )
    audio = {
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "num_mel_bins": _MEL_BINS,
        "max_source_positions": 1500,
    }
    config = transformers.Qwen2AudioConfig(
        audio_config=audio,
        text_config=language.text_config(tokenizer),
        audio_token_index=checkpoint.special_ids(tokenizer)[AUDIO],
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = transformers.Qwen2AudioForConditionalGeneration(config)
    language.fill(model, tokenizer, seed)
    checkpoint.save_weights(model, out, _PUBLISHED)
    transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(
            feature_size=_MEL_BINS, return_attention_mask=True
        ),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(out)
    checkpoint.write_generation_config(out, tokenizer)
