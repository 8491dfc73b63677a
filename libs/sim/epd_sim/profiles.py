"""How large and how slow a simulated model is, each figure with its source.

The models of time are linear, as one or a few published points allow no more:

* a batch of items is encoded in ``encode_row_s`` a row, a batch's later items cheaper by ``batch_gain``;
* an engine step takes ``prefill_token_s`` a prompt token, never less than ``step_s`` (one pass over the
  weights), and ``sequence_s`` more for each sequence that decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd_common.errors import EpdError


class UnknownProfileError(EpdError):
    """There is no profile of that name."""

    default_code = "profile_unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model on a device.

    Attributes:
        patch: Edge of a patch of a picture, in pixels; 2 x 2 of them are one row.
        max_rows: Rows of one picture, at most; larger ones are scaled down.
        keeps_tower: Whether a PD worker of the model has its vision tower in any case (DeepStack).
        width: Values in one row, of 2 bytes (bfloat16); a multiple of 16.
        max_model_len: Tokens of a prompt and its answer, at most.
        encode_row_s: Seconds the towers take for a row.
        encode_batch: Items in one batch, at most.
        batch_gain: Share of its time that an item saves in a large batch, from 0 to 1.
        prefill_token_s: Seconds the language model takes for a token of a prompt.
        prefill_budget: Tokens of one step, as vLLM's ``--max-num-batched-tokens``.
        step_s: Seconds a step takes at least.
        sequence_s: Seconds a decoding sequence adds to a step.
        kv_tokens: Tokens that the prefix cache holds; 0: there is none.
        kv_token_s: Seconds in which a token's keys and values come from another device.
        time_scale: All times are multiplied by it.
    """

    name: str
    patch: int
    max_rows: int
    width: int
    keeps_tower: bool = False
    max_model_len: int
    encode_row_s: float
    encode_batch: int
    batch_gain: float
    prefill_token_s: float
    prefill_budget: int
    step_s: float
    sequence_s: float
    kv_tokens: int = 0
    kv_token_s: float = 0.0
    time_scale: float = 1.0

    @property
    def max_item_rows(self) -> int:
        """Rows that the encoder cache holds: as in vLLM those of a step, or of the largest item."""
        return max(self.prefill_budget, self.max_rows)

    def encode_s(self, rows: Sequence[int]) -> float:
        """Seconds to encode a batch of items with so many rows each."""
        saved = self.batch_gain * (1 - 1 / len(rows))
        return self.encode_row_s * sum(rows) * (1 - saved) * self.time_scale

    def kv_load_s(self, tokens: int) -> float:
        """Seconds to load the keys and values of so many tokens."""
        return self.kv_token_s * tokens * self.time_scale

    def engine_step_s(self, prefill_tokens: int, decoding: int) -> float:
        """Seconds of a step that prefills so many tokens and decodes one of each of so many sequences."""
        compute_s = max(self.step_s, self.prefill_token_s * prefill_tokens)
        return (compute_s + self.sequence_s * decoding) * self.time_scale


# Published: one 1080p image is encoded in 167 ms and prefilled in 126 ms (2,718 prompt tokens); an embedding
# of it has 2,691 rows x 3,584. So 62 us a row and 46 us a token.
# Derived: a step reads 15.2 GB of weights (7.6 G parameters, bf16) at 60 % of the H100's 3.35 TB/s: 7.6 ms.
# A token of the prefix cache has 57 kB (28 layers, 4 KV heads of 128, keys and values, bf16): 53 GB of the 80
# are left for 900,000.
# Assumed: that 60 %, 0.1 ms a sequence, a gain of 20 % in batches of up to 8; keys and values come from
# another device at 25 GB/s, a network of 200 Gbit/s; 2,048 tokens a step and 32,768 a sequence are common
# settings of vLLM.
_QWEN2_5_VL = Profile(
    name="qwen2.5-vl-7b-h100",
    patch=14,
    max_rows=16384,
    width=3584,
    max_model_len=32768,
    encode_row_s=0.167 / 2691,
    encode_batch=8,
    batch_gain=0.2,
    prefill_token_s=0.126 / 2718,
    prefill_budget=2048,
    step_s=0.0076,
    sequence_s=0.0001,
    kv_tokens=900_000,
    kv_token_s=57e3 / 25e9,
)

# Published: TTFT of 201, 348, 425 and 636 ms for 1 to 4 images of 720p; an embedding of 1080p with DeepStack
# has 67 MB, which is 2,040 rows x 16,384.
# Derived: the least-squares line of the four is 138 ms an image and 57 ms besides. An image of 720p has
# 880 rows here. Encode and prefill share the 138 ms as they do on Qwen2.5-VL-7B (167 to 126): 79 and 59 ms.
# A step reads 16.4 GB of weights (8.2 G parameters) at 60 % of the H20's 4.0 TB/s: 6.8 ms.
# A token of the prefix cache has 147 kB (36 layers, 8 KV heads of 128): 66 GB of the 96 for 440,000.
# Assumed: that split, and what is assumed above. The 57 ms are of a whole server (HTTP, preprocessing), and
# none of them is simulated.
_QWEN3_VL = Profile(
    name="qwen3-vl-8b-h20",
    patch=16,
    max_rows=16384,
    width=16384,
    keeps_tower=True,
    max_model_len=32768,
    encode_row_s=0.079 / 880,
    encode_batch=8,
    batch_gain=0.2,
    prefill_token_s=0.059 / 880,
    prefill_budget=2048,
    step_s=0.0068,
    sequence_s=0.0001,
    kv_tokens=440_000,
    kv_token_s=147e3 / 25e9,
)

# Published: an embedding has at most 640 rows x 3,584. There is no published time of one stage alone.
# Derived, from the H100's figures above by dense bf16 peak (989 against 312 TFLOPS, data sheets): a token
# takes 3.2 times as long, as its language model has the size of Qwen2.5-VL's. A row is 16 patches instead of
# 4, through a tower of 0.40 instead of 0.67 G parameters: 2.4 times the work, so 7.5 times as long.
# A step reads 15.2 GB at 60 % of the A100's 2.0 TB/s: 12.7 ms.
# Its language model's cache is that of the H100's, on as much memory.
# Assumed: that times scale so, and what is assumed above. Its slices are not simulated: a picture's rows
# follow the grid of the others, up to 640.
_MINICPM_V = Profile(
    name="minicpm-v-2.6-a100",
    patch=14,
    max_rows=640,
    width=3584,
    max_model_len=32768,
    encode_row_s=0.167 / 2691 * 7.5,
    encode_batch=8,
    batch_gain=0.2,
    prefill_token_s=0.126 / 2718 * 3.2,
    prefill_budget=2048,
    step_s=0.0127,
    sequence_s=0.0001,
    kv_tokens=900_000,
    kv_token_s=57e3 / 25e9,
)

# No model at all: for tests of everything around an engine.
_INSTANT = Profile(
    name="instant",
    patch=14,
    max_rows=1024,
    width=64,
    max_model_len=32768,
    encode_row_s=0.0,
    encode_batch=8,
    batch_gain=0.0,
    prefill_token_s=0.0,
    prefill_budget=2048,
    step_s=0.0,
    sequence_s=0.0,
)

PROFILES = {profile.name: profile for profile in (_QWEN2_5_VL, _QWEN3_VL, _MINICPM_V, _INSTANT)}


def profile_named(name: str) -> Profile:
    """A profile by its name.

    Raises:
        UnknownProfileError: naming those that there are.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise UnknownProfileError(
            f"there is no profile {name!r}; these are: {', '.join(PROFILES)}"
        ) from None
