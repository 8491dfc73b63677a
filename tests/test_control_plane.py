"""The benchmark of what a request costs around the engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.control_plane import KINDS, Measured, main, medians
from epd_bench.pictures import PictureMaker
from epd_bench.workloads import Picture, edges


def test_pictures_have_the_sizes_that_the_kinds_are_named_after() -> None:
    maker = PictureMaker(1)
    for name, kind in KINDS.items():
        if kind.images:
            wanted = int(name.partition("x")[2].removesuffix("kB")) * 1000
            size = len(maker.data(Picture(*edges(kind.size), 1)))
            assert abs(size - wanted) < wanted / 8, name


def test_medians_are_taken_by_kind_system_and_role() -> None:
    found = [
        Measured(
            system=system,
            kind="text",
            round=number,
            cpu_ms={"nats": float(cpu_ms)},
            requests_per_s=1.0,
            reads=1.0,
        )
        for system, values in (("ours", (9, 1, 2)), ("proxy", (5, 4, 6)))
        for number, cpu_ms in enumerate(values)
    ]
    assert medians(found) == {"text": {"ours": {"nats": 2.0}, "proxy": {"nats": 5.0}}}


def test_options_that_mean_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.control_plane", "--kinds", "text,none"])
    assert main() == 2
    assert "there is no none" in capsys.readouterr().err


@pytest.mark.slow
def test_one_round_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    few = ["--systems", "ours", "--rounds", "1", "--scale", "0.05", "--kinds", "text,1x20kB"]
    monkeypatch.setattr(sys, "argv", ["bench.control_plane", *few, "--out", str(out)])
    assert main() == 0
    result = json.loads(out.read_text())
    assert result["concurrency"] == 64
    for kind in ("text", "1x20kB"):
        used = result["medians"][kind]["ours"]
        assert used["gateway"] > 0 and used["pd"] > 0 and used["nats"] > 0, kind
    assert result["medians"]["1x20kB"]["ours"]["decoders"] > 0
