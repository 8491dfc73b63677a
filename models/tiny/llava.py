"""LLaVA: a CLIP vision tower, for pictures that are all brought to one size.

vLLM takes this model's embeddings only whole, never as the size of a placeholder
(``MultiModalDataParser.embedding_fields`` has no entry), so a decoder must be given the picture.
"""

from __future__ import annotations

from pathlib import Path

import transformers

from models import checkpoint
from models.tiny import language

IMAGE = "<image>"
_SIDE_PX, _PATCH_PX = 112, 14
_PUBLISHED = {
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}


def build(out: Path, seed: int) -> None:
    """Write a LLaVA whose pictures are 64 tokens each."""
    tokenizer = language.make_tokenizer(
        language.one_medium_template(IMAGE),
        (checkpoint.END_OF_TEXT, checkpoint.TURN_START, checkpoint.TURN_END, IMAGE),
    )
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": _SIDE_PX,
        "patch_size": _PATCH_PX,
    }
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=language.text_config(tokenizer, model_type="llama"),
        image_token_index=checkpoint.special_ids(tokenizer)[IMAGE],
        image_seq_length=(_SIDE_PX // _PATCH_PX) ** 2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = transformers.LlavaForConditionalGeneration(config)
    language.fill(model, tokenizer, seed)
    checkpoint.save_weights(model, out, _PUBLISHED)
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": _SIDE_PX},
            crop_size={"height": _SIDE_PX, "width": _SIDE_PX},
        ),
        tokenizer=tokenizer,
        patch_size=_PATCH_PX,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # CLIP's class token, which "default" leaves out again
        chat_template=tokenizer.chat_template,
    ).save_pretrained(out)
    checkpoint.write_generation_config(out, tokenizer)
