"""Random-weight checkpoints of about 1 M parameters, built in seconds.

Their answers mean nothing but are a fixed function of the prompt and the media, so two ways of
serving them can be compared token by token. ``python -m models.tiny`` builds one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from epd_vllm.compat import prepare_environment
from models.tiny import llava, qwen2_audio, qwen_vl

_BUILDERS: dict[str, Callable[[Path, int], None]] = {
    "qwen2_5_vl": qwen_vl.build_2_5,
    "qwen3_vl": qwen_vl.build_3,
    "qwen2_audio": qwen2_audio.build,
    "llava": llava.build,
}
ARCHITECTURES: tuple[str, ...] = tuple(_BUILDERS)


def build(arch: str, out: Path, seed: int = 0) -> None:
    """Write a random-weight checkpoint into ``out``.

    Args:
        arch: one of ``ARCHITECTURES``.
        out: folder for the checkpoint, made if missing.
        seed: of the weights; the tokenizer is always the same.

    Raises:
        ValueError: an unknown architecture.
    """
    if arch not in _BUILDERS:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    prepare_environment()
    out.mkdir(parents=True, exist_ok=True)
    _BUILDERS[arch](out, seed)
