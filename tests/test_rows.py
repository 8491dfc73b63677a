"""Rows that an embedding has, and those for which a prompt has room."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from epd_common.engines import EngineInfo
from epd_common.store.embedding import EmbeddingHeader, IntegrityError

INFO = EngineInfo(
    model="m",
    fingerprint="f",
    modalities=("image",),
    max_model_len=1,
    special_tokens=(),
    merge=2,
)


def header(rows: int, metadata: Any) -> EmbeddingHeader:
    return EmbeddingHeader(key="k", rows=rows, width=8, dtype="float16", metadata=metadata)


FITS = [
    (4, {"image_grid_thw": [1, 4, 4]}),
    (32, {"video_grid_thw": [2, 8, 8], "second_per_grid_ts": 1.0}),
    (7, {"audio_num_tokens": 7}),
]


@pytest.mark.parametrize(("rows", "metadata"), FITS)
def test_fc15_rows_follow_from_the_metadata(rows: int, metadata: Any) -> None:
    INFO.check_rows(header(rows, metadata))
    for wrong in (rows - 1, rows + 1):
        with pytest.raises(IntegrityError, match=f"{wrong} rows"):
            INFO.check_rows(header(wrong, metadata))


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"tokens": 4},
        {"image_grid_thw": [1, 4]},
        {"image_grid_thw": [1, 4, "4"]},
        {"image_grid_thw": 4},
        {"audio_num_tokens": "7"},
    ],
)
def test_what_cannot_be_told_is_not_judged(metadata: Any) -> None:
    INFO.check_rows(header(5, metadata))


def test_a_model_whose_rows_do_not_follow_from_a_grid_is_not_judged() -> None:
    EngineInfo(
        model="m", fingerprint="f", modalities=(), max_model_len=1, special_tokens=()
    ).check_rows(header(5, {"image_grid_thw": [1, 4, 4]}))


def test_fc15_an_encoder_on_vllm_announces_no_wrong_rows(tmp_path: Path) -> None:
    import torch

    from epd_vllm.embedding_io import seal, write_staged

    key = secrets.token_hex(32)
    write_staged(tmp_path, key, torch.ones(5, 8))
    with pytest.raises(IntegrityError, match=r"gave 5 rows for .* has 4"):
        seal(tmp_path / key, key=key, fingerprint="f", metadata={}, rows=4)
    assert seal(tmp_path / key, key=key, fingerprint="f", metadata={}, rows=5).rows == 5
