"""The model fingerprint (invariant I9): which embeddings fit which engine."""

from __future__ import annotations

import hashlib
from pathlib import Path

from epd_vllm.compat import SUPPORTED

_CONFIG_FILES = ("config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_SAMPLE_BYTES = 64 * 1024


def model_fingerprint(folder: Path, *, revision: str, dtype: str, width: int) -> str:
    """64 hex characters over all that changes an embedding.

    vLLM enters by the range of versions that are supported together: their embeddings are interchangeable.
    Model and processor configuration enter whole, weights by a sample from the head, the middle and the
    end of each file, so that a fine-tuned model has a fingerprint of its own without reading gigabytes.

    Args:
        folder: The checkpoint's folder; its path does not enter, so nodes may keep it anywhere.
        width: Values in one row of an embedding.
    """
    versions = "-".join(".".join(map(str, bound)) for bound in SUPPORTED)
    head = ("epd-model-2", f"vllm {versions}", revision, dtype, str(width), "")
    parts = hashlib.sha256("\n".join(head).encode())
    for name in _CONFIG_FILES:
        path = folder / name
        parts.update(name.encode() + (path.read_bytes() if path.exists() else b""))
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        parts.update(f"{path.name}:{size}".encode())
        with open(path, "rb") as file:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(start)
                parts.update(file.read(_SAMPLE_BYTES))
    return parts.hexdigest()
