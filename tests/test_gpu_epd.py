"""The benchmark for a GPU, run small on the CPU: that its model does what it says, and keeps to its time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm]  # for torch, which is only there with vLLM

ROOT = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-m", "bench.gpu_epd")


@pytest.fixture(scope="module")
def like() -> Any:
    import torch

    torch.manual_seed(3)
    return torch.empty(0, dtype=torch.float32)


def test_prefill_in_parts_is_prefill(like: Any) -> None:
    """Else early prefill would be compared with something easier."""
    import torch

    from bench.gpu_model import SHAPES, Decoder, prefill

    decoder = Decoder(SHAPES["tiny"], like)
    rows = decoder.text(2, 40)
    with torch.inference_mode():
        whole = prefill(decoder, [rows], 40)
        parts = prefill(decoder, [rows[:, :7], rows[:, 7:8], rows[:, 8:33], rows[:, 33:]], 40)
        assert torch.allclose(whole, parts, atol=1e-5)
        moved = torch.cat((rows[:, 20:], rows[:, :20]), dim=1)
        assert not torch.allclose(whole, prefill(decoder, [moved], 40), atol=1e-5), "order matters"
        other = torch.cat((decoder.text(2, 1), rows[:, 1:]), dim=1)
        assert not torch.allclose(whole, prefill(decoder, [other], 40), atol=1e-5), "and all before"


def test_a_picture_has_the_rows_of_its_size_and_sees_itself_whole(like: Any) -> None:
    import torch

    from bench.gpu_model import SHAPES, VisionTower

    tower = VisionTower(SHAPES["tiny"], like)
    patches = tower.patches(224, 168)
    with torch.inference_mode():
        rows = tower.encode(patches)
        assert rows.shape == ((224 // 28) * (168 // 28), SHAPES["tiny"].width)
        patches[0, 0] += 1
        changed = (tower.encode(patches) - rows).abs().amax(dim=1)
    assert bool((changed > 0).all()), "the last layer attends from one end to the other"


def test_a_small_run_has_all_sections(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    run = subprocess.run(
        [*COMMAND, "--device", "cpu", "--limit", "90", "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(file.read_text())
    assert report == json.loads(run.stdout)
    assert report["card"].startswith("none") and report["driver"] == "" and report["date"]
    assert "left_out" not in report and "cut_off" not in report
    sections = report["sections"]
    assert set(sections["moves"]) == {"1 MB", "8 MB"}
    assert all(part["gb_s"] > 0 for size in sections["moves"].values() for part in size.values())
    assert set(sections["encode"]) == {"112x112", "224x168"}
    assert set(sections["prefill"]) == {"64", "256"} and set(sections["decode"]) == {
        "1 x 64",
        "4 x 64",
    }
    early = sections["early"]
    assert early["logits_apart"] < 1e-3
    assert early["early"]["rounds"] == early["waiting"]["rounds"] == 20
    for name in ("moves", "build", "encode", "prefill", "decode", "early"):
        assert f"] {name}, " in run.stderr


def test_what_does_not_fit_into_a_section_is_named() -> None:
    from bench.gpu_epd import Report

    report = Report("cpu", "tiny", None, limit_s=0.0)
    found = report.section("moves", lambda budget: {name: 1 for name in budget.each(["1 MB"])})
    assert found == report.found["sections"]["moves"] == {}
    assert report.found["left_out"] == {"moves": ["1 MB"]}


def test_at_the_limit_it_ends_with_what_it_has(tmp_path: Path) -> None:
    file, arena = tmp_path / "gpu.json", tmp_path / "arena"
    arena.mkdir()
    options = ("--limit", "0.01", "--json", str(file), "--arena", str(arena))
    run = subprocess.run(
        [*COMMAND, "--device", "cpu", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 3, run.stderr
    assert json.loads(file.read_text())["cut_off"] is True
    assert list(arena.iterdir()) == []
