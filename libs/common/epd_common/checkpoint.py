"""Whether a checkpoint's folder is whole: seen from its files alone, in milliseconds, before an engine loads
it for a minute and then fails in words of its own."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "spiece.model")
_POINTER = b"version https://git-lfs"
_POINTER_MAX_BYTES = 1024
_MAX_HEADER_BYTES = 100 << 20


def faults(folder: Path, engine_args: str = "") -> list[str]:
    """What is missing or cut short in a checkpoint; empty where nothing is.

    Args:
        engine_args: As given to the engine: weights or a tokenizer from elsewhere are not looked for.
    """
    config = folder / "config.json"
    try:
        json.loads(config.read_bytes())
    except FileNotFoundError:
        return [f"there is no config.json in {folder}"]
    except (OSError, ValueError) as error:
        return [f"config.json cannot be read ({error})"]
    found = [] if "--load-format" in engine_args else list(_weights(folder))
    if "--tokenizer" not in engine_args and not any(
        (folder / name).exists() for name in TOKENIZERS
    ):
        found.append(f"there is no tokenizer ({', '.join(TOKENIZERS)})")
    return found


def _weights(folder: Path) -> Iterator[str]:
    for name in INDEXES:
        index = folder / name
        if not index.exists():
            continue
        try:
            shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"{name} cannot be read ({error})"
            return
        for shard in shards:
            if fault := _of_file(folder / str(shard)):
                yield fault
        return
    files = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
    if not files:
        yield f"there are no weights ({', '.join(WEIGHTS)})"
    for file in files:
        if fault := _of_file(file):
            yield fault


def _of_file(path: Path) -> str:
    """What is wrong with a file of weights; empty if nothing is."""
    try:
        bytes_there = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(len(_POINTER))
            if bytes_there <= _POINTER_MAX_BYTES and head == _POINTER:
                return f"{path.name} is a Git LFS pointer; what it points to was not fetched"
            if not bytes_there:
                return f"{path.name} is empty"
            if path.suffix == ".safetensors":
                file.seek(0)
                needed = _safetensors_bytes(file.read)
                if bytes_there < needed:
                    return f"{path.name} has {bytes_there} bytes of {needed}"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path.name} cannot be read ({error})"
    return ""


def _safetensors_bytes(read: Callable[[int], bytes]) -> int:
    """Bytes that a file must have by its header: a length, JSON with each tensor's place, the tensors."""
    (length,) = struct.unpack("<Q", read(8).ljust(8, b"\0"))
    if length > _MAX_HEADER_BYTES:
        raise ValueError("it does not begin as a safetensors file")
    head = read(length)
    if len(head) < length:
        return int(8 + length)
    places = json.loads(head)
    ends = [place["data_offsets"][1] for name, place in places.items() if name != "__metadata__"]
    return int(8 + length + max(ends, default=0))
