"""The benchmark of the stores: what it makes of times, and that all its ways can be gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.store import rows_of, table
from bench.store_ways import MEMCPY, ROW_BYTES, WAYS

ROOT = Path(__file__).resolve().parents[1]
SIZE = 1000 * ROW_BYTES


def test_a_ratio_is_that_of_the_rounds_and_not_of_the_medians() -> None:
    copy, other = rows_of(SIZE, 2, {MEMCPY: [0.1, 0.2, 0.4], "put": [0.2, 1.0, 0.8]})
    assert (copy.ms, copy.to_memcpy) == (200.0, 1.0)
    assert other.to_memcpy == 2.0, "of 2, 5 and 2; the medians would say 4"
    assert (other.ms, other.ms_p10, other.ms_p90, other.rounds) == (800.0, 200.0, 1000.0, 3)
    assert other.gb_s == round(2 * SIZE / 0.8 / 1e9, 2), "of both processes together"
    assert table([other]).splitlines()[-1] == "| put | 800.0 ms (200.0-1000.0), x 2.0 |"


@pytest.mark.slow
def test_all_ways_can_be_gone(tmp_path: Path) -> None:
    file = tmp_path / "store.json"
    options = ("--sizes", "1,9", "--concurrency", "2", "--seconds", "0", "--json", str(file))
    run = subprocess.run(
        [sys.executable, "-m", "bench.store", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(file.read_text())
    assert report["machine"]["processor"] in run.stdout
    assert {(row["way"], row["mb"]) for row in report["rows"]} == {
        (way, mb) for way in WAYS for mb in (1, 9)
    }
    assert all(row["ms"] > 0 for row in report["rows"])
