"""The trained model's network: Qwen2-VL at 2.1 M parameters, and what only its training needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional

from models import checkpoint, shapes

HIDDEN = 128
PATCH_PX = 14
MERGE = 2
ATTRIBUTES: tuple[tuple[str, ...], ...] = (
    shapes.SHAPES,
    tuple(shapes.COLOURS),
    tuple(shapes.BACKGROUNDS),
)
IGNORED = -100  # the target that torch's cross entropy leaves out

_LAYERS = 4
_FEATURE_STD = 0.5
_EMBEDDING_STD = 0.15


def make_model(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> transformers.Qwen2VLForConditionalGeneration:
    """Make the untrained model for a tokenizer."""
    ids = checkpoint.special_ids(tokenizer)
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": HIDDEN // 32,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "max_window_layers": _LAYERS,
        "use_sliding_window": False,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
        "bos_token_id": ids[checkpoint.END_OF_TEXT],
        "eos_token_id": ids[checkpoint.TURN_END],
        "pad_token_id": ids[checkpoint.END_OF_TEXT],
    }
    vision = {
        "depth": 4,
        "embed_dim": 128,
        "num_heads": 2,
        "mlp_ratio": 4,
        "hidden_size": HIDDEN,
        "patch_size": PATCH_PX,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[checkpoint.IMAGE_PAD],
        video_token_id=ids[checkpoint.VIDEO_PAD],
        vision_start_token_id=ids[checkpoint.VISION_START],
        vision_end_token_id=ids[checkpoint.VISION_END],
        vision_token_id=ids[checkpoint.VISION_PAD],
        tie_word_embeddings=True,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


class AttributeHeads(nn.Module):
    """Training-only classifiers of shape, colour and background from a hidden vector."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(HIDDEN, len(names)) for names in ATTRIBUTES)

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, weights: Sequence[float]
    ) -> tuple[torch.Tensor, list[float]]:
        """Return the weighted loss and the three accuracies.

        Args:
            hidden: (rows, HIDDEN).
            targets: (rows, 3) class numbers, as ``scene_targets`` gives them.
            weights: of the three losses.
        """
        loss = hidden.new_zeros(())
        accuracies = []
        for head, target, weight in zip(self.heads, targets.unbind(1), weights, strict=True):
            logits = head(hidden)
            loss = loss + weight * functional.cross_entropy(logits, target)
            accuracies.append((logits.argmax(-1) == target).float().mean().item())
        return loss, accuracies


def scene_targets(scene: shapes.Scene) -> tuple[int, int, int]:
    """Number a scene's shape, colour and background for ``AttributeHeads``."""
    names = (scene.shape, scene.colour, scene.background)
    shape, colour, background = (
        known.index(name) for known, name in zip(ATTRIBUTES, names, strict=True)
    )
    return shape, colour, background


def patchify(pictures: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what the image processor does, for uint8 pictures (H, W, 3) of one size.

    Returns pixel values (pictures * patches, 3 * 2 * 14 * 14), the patches of a merged token side
    by side, and the grids (pictures, 3).
    """
    stacked = np.stack(pictures).astype(np.float32) / 255.0
    mean, spread = np.array([checkpoint.IMAGE_MEAN, checkpoint.IMAGE_STD], np.float32)
    stacked = (stacked - mean) / spread
    count, height, width, channels = stacked.shape
    rows, columns = height // PATCH_PX, width // PATCH_PX
    pixels = torch.from_numpy(np.ascontiguousarray(stacked.transpose(0, 3, 1, 2)))
    pixels = pixels.view(
        count, channels, rows // MERGE, MERGE, PATCH_PX, columns // MERGE, MERGE, PATCH_PX
    ).permute(0, 2, 5, 3, 6, 1, 4, 7)
    pixels = pixels.unsqueeze(6).expand(*pixels.shape[:6], 2, PATCH_PX, PATCH_PX)
    grid = torch.tensor([[1, rows, columns]] * count)
    return pixels.reshape(count * rows * columns, -1), grid


def picture_features(tower: nn.Module, pictures: Sequence[np.ndarray]) -> torch.Tensor:
    """Run the vision tower on pictures of one size: (pictures, tokens, HIDDEN)."""
    pixels, grid = patchify(pictures)
    return tower(pixels, grid_thw=grid).pooler_output.view(len(pictures), -1, HIDDEN)


@contextlib.contextmanager
def batched_vision() -> Iterator[None]:
    """Run the vision tower as one batch while all its pictures have one size.

    The library's attention walks over the pictures one after the other, and its patch embedding is
    a 3-D convolution; as plain batched products both are several times faster on a CPU.
    """
    # here, not above: importing it needs a torchvision that may have to be mended first
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl

    def attend(
        self: nn.Module,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: object,
    ) -> torch.Tensor:
        total, count = hidden_states.shape[0], cu_seqlens.numel() - 1
        qkv = self.qkv(hidden_states).reshape(total, 3, self.num_heads, -1).unbind(1)
        query, key = qwen2_vl.apply_rotary_pos_emb_vision(qkv[0], qkv[1], *position_embeddings)
        query, key, value = (
            tensor.view(count, total // count, self.num_heads, -1).transpose(1, 2)
            for tensor in (query, key, qkv[2])
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(total, -1))

    def embed(self: nn.Module, patches: torch.Tensor) -> torch.Tensor:
        weight = self.proj.weight.sum(2).flatten(1)  # both frames of a still picture are the same
        still = patches.view(len(patches), 3, 2, -1)[:, :, 0].flatten(1)
        return functional.linear(still, weight)

    slow_attend, slow_embed = qwen2_vl.VisionAttention.forward, qwen2_vl.PatchEmbed.forward
    qwen2_vl.VisionAttention.forward, qwen2_vl.PatchEmbed.forward = attend, embed
    try:
        yield
    finally:
        qwen2_vl.VisionAttention.forward = slow_attend
        qwen2_vl.PatchEmbed.forward = slow_embed


@torch.no_grad()
def match_scales(
    model: transformers.Qwen2VLForConditionalGeneration, features: torch.Tensor
) -> None:
    """Bring picture features and the untrained language part to one scale.

    The library's spread of 0.02 suits wide models; at a width of 128 learning would hardly start.
    """
    last = [part for part in model.model.visual.merger.modules() if isinstance(part, nn.Linear)][-1]
    ratio = _FEATURE_STD / features.std()
    last.weight.mul_(ratio)
    last.bias.mul_(ratio)
    inner = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    for name, parameter in model.model.language_model.named_parameters():
        if "embed_tokens" in name:
            parameter.normal_(0, _EMBEDDING_STD)
        elif parameter.dim() == 2:
            gain = 0.7 if any(part in name for part in inner) else 0.25
            parameter.normal_(0, gain * parameter.shape[1] ** -0.5)
