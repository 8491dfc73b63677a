"""Prefill of what is already there, on a real engine: step by step, in every order, and never fatal."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from deployment import ROOT, SMALL_MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
TEXT_SLOWDOWN = 1.5
"""What requests that wait for pictures may cost a text request (p50); plus a scheduling hiccup, below."""

HICCUP_S = 0.010
VARIANTS: dict[str, tuple[list[str], list[str], dict[str, str]]] = {
    "default": (
        [
            "arrival_orders",
            "shared_and_repeated",
            "stalled",
            "cancelled",
            "unfit_files",
            "evicted_while_in_use",
            "encoder_cache_reset",
        ],
        [],
        {},
    ),
    "polling": (["arrival_orders", "stalled"], [], {"EPD_TEST_POLLING": "1"}),
    "no prefix caching": (
        ["arrival_orders", "shared_and_repeated"],
        ["--no-enable-prefix-caching"],
        {},
    ),
    "no chunked prefill": (
        ["arrival_orders", "shared_and_repeated"],
        ["--no-enable-chunked-prefill"],
        {},
    ),
    "small KV cache": (
        ["preempted"],
        ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(3 << 20)],
        {},
    ),
}


async def run_rig(folder: Path, variant: str) -> dict[str, Any]:
    scenarios, arguments, environment = VARIANTS[variant]
    path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "gating_rig.py"),
        str(SMALL_MODEL),
        str(folder),
        ",".join(scenarios),
        *arguments,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    lines = out.decode().splitlines()
    found = [line for line in lines if line.startswith("RESULTS ")]
    assert found, "\n".join(lines[-40:])
    results: dict[str, Any] = json.loads(found[0].removeprefix("RESULTS "))
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the embeddings are kept between variants."""
    return tmp_path_factory.mktemp("gating")


@pytest.mark.parametrize(
    "variant",
    [
        variant if variant == "default" else pytest.param(variant, marks=pytest.mark.extra)
        for variant in VARIANTS
    ],
)
async def test_fc06_prefill_meets_late_embeddings(folder: Path, variant: str) -> None:
    results = await run_rig(folder, variant)
    assert results.pop("alive")
    for scenario, result in results.items():
        CHECKS[scenario](result, variant)


def check_orders(result: dict[str, Any], variant: str) -> None:
    expected = result.pop("expected")
    assert expected["status"] == 200
    stops = {0}
    for title, found in result.items():
        assert found["answer"] == expected, title
        prefill = [step for step in found["steps"] if step[1] > 1]
        # Each step begins where the one before it ended, and the first one is the text alone.
        assert prefill[0][0] == 0
        ends = [computed + scheduled for computed, scheduled in prefill]
        assert [computed for computed, _ in prefill[1:]] == ends[:-1], title
        stops |= set(ends)
    steps = {title: [s for s in found["steps"] if s[1] > 1] for title, found in result.items()}
    assert len(steps["first to last"]) == 4  # text, then item by item
    assert len(steps["last to first"]) == 2  # text, then all three at once
    assert len(steps["mixed"]) == 2
    assert steps["last to first"][0] == steps["first to last"][0]


def check_shared(result: dict[str, Any], variant: str) -> None:
    assert result["answers"] == [result["expected"]] * 2


def check_stalled(result: dict[str, Any], variant: str) -> None:
    assert result["cancelled"]
    assert result["beside_p50_s"] <= TEXT_SLOWDOWN * result["alone_p50_s"] + HICCUP_S
    if variant == "default":
        assert result["idle_cpu_share"] < 0.05
    print(f"{variant}: {result}")


def check_cancelled(result: dict[str, Any], variant: str) -> None:
    quiet = result["quiet"]
    for stage in ("prefill", "decode"):
        before, after = result[f"{stage}, before"], result[stage]
        assert before["running"] > 1 and before["kv_usage"] > quiet["kv_usage"], stage
        assert (after["running"], after["waiting"]) == (quiet["running"], quiet["waiting"]), stage
        assert after["kv_usage"] == quiet["kv_usage"], stage


def check_unfit(result: dict[str, Any], variant: str) -> None:
    expected = result.pop("expected")
    assert len(result) == 7
    for title, found in result.items():
        assert found["answer"] == {"status": 500, "ids": None}, title
        assert found["alive"], title
        assert found["next"] == expected, title


def check_evicted(result: dict[str, Any], variant: str) -> None:
    assert result["answer"] == result["expected"]
    assert result["answer"]["status"] == 200
    assert result["evicted"]


def check_reset(result: dict[str, Any], variant: str) -> None:
    assert result["expected"]["status"] == 200
    assert result["answers"] == [result["expected"]] * 2


def check_preempted(result: dict[str, Any], variant: str) -> None:
    assert result["restarts"] > 0  # the cache was too small indeed
    assert result["begins"] == [result["expected"]] * 4
    assert result["lengths"] == [300] * 4


CHECKS = {
    "arrival_orders": check_orders,
    "shared_and_repeated": check_shared,
    "stalled": check_stalled,
    "cancelled": check_cancelled,
    "unfit_files": check_unfit,
    "evicted_while_in_use": check_evicted,
    "encoder_cache_reset": check_reset,
    "preempted": check_preempted,
}
