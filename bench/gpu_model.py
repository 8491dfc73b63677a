"""A vision tower and a decoder of the shapes of Qwen2.5-VL, with random weights, in torch alone.

They do the work of a model and say nothing: the same matrix products, attention over windows and over all,
and a cache of keys and values that prefill fills in as many parts as one likes. Eager kernels, no CUDA
graphs, so that a step of decode costs more here than in a serving engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

PATCH_PX = 14
MERGE = 2
WINDOW = 8
"""Patches along a side of an attention window: 112 px."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. ``full`` are the vision layers that attend to everything."""

    name: str
    vision_layers: int
    vision_width: int
    vision_mlp: int
    vision_heads: int
    full: tuple[int, ...]
    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int


SHAPES = {
    "7b": Shape("7b", 32, 1280, 3420, 16, (7, 15, 23, 31), 28, 3584, 18944, 28, 4, 128, 152_064),
    "tiny": Shape("tiny", 2, 64, 128, 2, (1,), 2, 128, 256, 4, 2, 32, 1000),
}
"""``7b`` is Qwen2.5-VL-7B; ``tiny`` is for tests on a CPU."""

Layer = dict[str, Any]


def _weights(rows: int, columns: int, like: Any) -> Any:
    return torch.empty(rows, columns, device=like.device, dtype=like.dtype).normal_(0, 0.02)


def _mlp(width: int, inner: int, like: Any) -> Layer:
    return {
        "gate_up": _weights(2 * inner, width, like),
        "down": _weights(width, inner, like),
        "norm": torch.ones(width, device=like.device, dtype=like.dtype),
    }


def _through_mlp(hidden: Any, layer: Layer) -> Any:
    normed = F.rms_norm(hidden, (hidden.shape[-1],), layer["norm"])
    gate, up = F.linear(normed, layer["gate_up"]).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * up, layer["down"])


def _rotated(values: Any, positions: Any) -> Any:
    """Rotary positions; ``values`` is (..., tokens, heads, head width), ``positions`` has a row a token."""
    half = values.shape[-1] // 2
    steps = torch.arange(half, device=values.device, dtype=torch.float32) / half
    angles = positions.float()[:, None] * (10_000.0**-steps)[None, :]
    cos, sin = angles.cos().to(values.dtype)[:, None, :], angles.sin().to(values.dtype)[:, None, :]
    first, second = values.split(half, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class VisionTower:
    """From patches of a picture to rows of the decoder's width."""

    def __init__(self, shape: Shape, like: Any) -> None:
        self._shape = shape
        self._like = like
        width = shape.vision_width
        self._embed = _weights(width, 3 * 2 * PATCH_PX**2, like)
        self._layers = [
            {
                "qkv": _weights(3 * width, width, like),
                "out": _weights(width, width, like),
                "norm": torch.ones(width, device=like.device, dtype=like.dtype),
                "mlp": _mlp(width, shape.vision_mlp, like),
            }
            for _ in range(shape.vision_layers)
        ]
        merged = width * MERGE**2
        self._merge = (_weights(merged, merged, like), _weights(shape.width, merged, like))

    def patches(self, width_px: int, height_px: int) -> Any:
        """Random patches of a picture of such a size, as a tensor (rows, columns, values); even numbers."""
        side = PATCH_PX * MERGE
        rows, columns = (MERGE * max(1, round(px / side)) for px in (height_px, width_px))
        values = 3 * 2 * PATCH_PX**2
        return torch.randn(rows, columns, values, device=self._like.device).to(self._like.dtype)

    def encode(self, patches: Any) -> Any:
        """A row for each ``MERGE`` x ``MERGE`` patches.

        A picture whose sides are no whole number of windows is padded to one, which a real tower does not do:
        its windows at the edges are smaller.
        """
        rows, columns, _ = patches.shape
        down, right = -rows % WINDOW, -columns % WINDOW
        hidden = F.linear(F.pad(patches, (0, 0, 0, right, 0, down)), self._embed)
        high, wide = hidden.shape[0] // WINDOW, hidden.shape[1] // WINDOW
        width = self._shape.vision_width
        windows = hidden.reshape(high, WINDOW, wide, WINDOW, width).transpose(1, 2)
        hidden = windows.reshape(high * wide, WINDOW**2, width)
        for number, layer in enumerate(self._layers):
            if number in self._shape.full:
                whole = hidden.reshape(1, -1, width)
                hidden = self._layer(whole, layer).reshape(hidden.shape)
            else:
                hidden = self._layer(hidden, layer)
        hidden = hidden.reshape(high, wide, WINDOW, WINDOW, width).transpose(1, 2)
        hidden = hidden.reshape(high * WINDOW, wide * WINDOW, width)[:rows, :columns]
        quads = hidden.reshape(rows // MERGE, MERGE, columns // MERGE, MERGE, width).transpose(1, 2)
        merged = quads.reshape(rows * columns // MERGE**2, MERGE**2 * width)
        first, second = self._merge
        return F.linear(F.gelu(F.linear(merged, first)), second)

    def _layer(self, hidden: Any, layer: Layer) -> Any:
        heads = self._shape.vision_heads
        batch, tokens, width = hidden.shape
        normed = F.rms_norm(hidden, (width,), layer["norm"])
        qkv = F.linear(normed, layer["qkv"]).reshape(batch, tokens, 3, heads, width // heads)
        positions = torch.arange(tokens, device=hidden.device)
        query, key = (_rotated(qkv[:, :, which], positions).transpose(1, 2) for which in (0, 1))
        attended = F.scaled_dot_product_attention(query, key, qkv[:, :, 2].transpose(1, 2))
        hidden = hidden + F.linear(
            attended.transpose(1, 2).reshape(batch, tokens, width), layer["out"]
        )
        return _through_mlp(hidden, layer["mlp"])


class Cache:
    """Keys and values of up to ``room`` tokens, of ``batch`` sequences that are equally long."""

    def __init__(self, shape: Shape, batch: int, room: int, like: Any) -> None:
        sizes = (shape.layers, 2, batch, room, shape.kv_heads, shape.head_width)
        self.values = torch.zeros(sizes, device=like.device, dtype=like.dtype)
        self.length = 0


class Decoder:
    """A causal language model of which prefill and decode are the same call."""

    def __init__(self, shape: Shape, like: Any) -> None:
        self.shape = shape
        self._like = like
        query = shape.heads * shape.head_width
        self._embed = _weights(shape.vocabulary, shape.width, like)
        self._head = _weights(shape.vocabulary, shape.width, like)
        self._layers = [
            {
                "qkv": _weights(query + 2 * shape.kv_heads * shape.head_width, shape.width, like),
                "out": _weights(shape.width, query, like),
                "norm": torch.ones(shape.width, device=like.device, dtype=like.dtype),
                "mlp": _mlp(shape.width, shape.mlp, like),
            }
            for _ in range(shape.layers)
        ]

    def cache(self, batch: int, room: int) -> Cache:
        """An empty one."""
        return Cache(self.shape, batch, room, self._like)

    def text(self, batch: int, tokens: int) -> Any:
        """Rows of random tokens."""
        ids = torch.randint(self.shape.vocabulary, (batch, tokens), device=self._like.device)
        return F.embedding(ids, self._embed)

    def forward(self, rows: Any, cache: Cache) -> Any:
        """Go on behind what is cached with rows (batch, tokens, width); logits of each one's last token."""
        shape = self.shape
        batch, tokens, _ = rows.shape
        begin, cache.length = cache.length, cache.length + tokens
        positions = torch.arange(begin, cache.length, device=rows.device)
        hidden = rows
        for number, layer in enumerate(self._layers):
            normed = F.rms_norm(hidden, (shape.width,), layer["norm"])
            found = F.linear(normed, layer["qkv"]).reshape(batch, tokens, -1, shape.head_width)
            query, key, value = found.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=2)
            kept = cache.values[number]
            kept[0, :, begin : cache.length] = _rotated(key, positions)
            kept[1, :, begin : cache.length] = value
            attended = self._attend(_rotated(query, positions), kept[:, :, : cache.length])
            hidden = hidden + F.linear(attended.reshape(batch, tokens, -1), layer["out"])
            hidden = _through_mlp(hidden, layer["mlp"])
        return F.linear(hidden[:, -1], self._head)

    def _attend(self, query: Any, kept: Any) -> Any:
        each = self.shape.heads // self.shape.kv_heads
        key, value = (
            kept[which].repeat_interleave(each, dim=2).transpose(1, 2) for which in (0, 1)
        )
        mask = causal_lower_right(query.shape[1], key.shape[2]) if query.shape[1] > 1 else None
        attended = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, attn_mask=mask)
        return attended.transpose(1, 2)


def prefill(decoder: Decoder, parts: Sequence[Any], room: int) -> Any:
    """Logits behind all parts, given to the decoder one after the other."""
    cache = decoder.cache(parts[0].shape[0], room)
    logits = None
    for part in parts:
        logits = decoder.forward(part, cache)
    return logits
