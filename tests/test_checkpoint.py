"""A checkpoint's folder that is not whole is named for what it lacks, before an engine tries to load it."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from epd_common.checkpoint import faults

SMALL_MODEL = Path(__file__).parents[1] / "models" / "shapes-qwen2vl"


def safetensors(values: int) -> bytes:
    head = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "w": {"dtype": "F32", "shape": [values], "data_offsets": [0, 4 * values]},
        }
    ).encode()
    return struct.pack("<Q", len(head)) + head + bytes(4 * values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two shards."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = {"weight_map": shards}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in shards.values():
        (tmp_path / name).write_bytes(safetensors(100))
    return tmp_path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def test_a_whole_one_has_no_faults(folder: Path) -> None:
    assert faults(folder) == []
    assert faults(SMALL_MODEL) == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "config.json").unlink(), "there is no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "model-2.safetensors").unlink(), "model-2.safetensors is missing"),
        (lambda f: cut(f / "model-1.safetensors"), r"model-1.safetensors has \d+ bytes of \d+"),
        (
            lambda f: (f / "model-1.safetensors").write_bytes(b"\xff" * 64),
            "model-1.safetensors cannot be read",
        ),
        (lambda f: (f / "model-1.safetensors").write_bytes(b""), "model-1.safetensors is empty"),
        (
            lambda f: (f / "model-1.safetensors").write_text("version https://git-lfs/v1\noid x\n"),
            "model-1.safetensors is a Git LFS pointer",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text("[]"),
            "model.safetensors.index.json cannot be read",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), "there is no tokenizer"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, spoil: Callable[[Path], None], said: str) -> None:
    spoil(folder)
    (found,) = faults(folder)
    assert re.match(said, found), found


def test_a_folder_without_weights(tmp_path: Path) -> None:
    shutil.copy(SMALL_MODEL / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert ["there are no weights" in each for each in faults(tmp_path)] == [True]
    assert faults(tmp_path, "--load-format dummy") == []


def test_a_tokenizer_from_elsewhere_is_not_looked_for(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert faults(folder, "--tokenizer /elsewhere") == []
