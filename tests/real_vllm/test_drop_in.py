"""Hooks of the connector for plain ``vllm serve``, where no engine can be brought to the situation."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from deployment import SMALL_MODEL

from epd_cli.server_process import dying_with_parent

pytestmark = [pytest.mark.vllm, pytest.mark.extra, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
async def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    arena = tmp_path_factory.mktemp("drop-in") / "arena"
    program = str(Path(__file__).with_name("drop_in_rig.py"))
    process = await asyncio.create_subprocess_exec(
        *dying_with_parent([sys.executable, program, str(SMALL_MODEL), str(arena)]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    result: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return result | {"log": err.decode()}


def test_the_hooks_have_the_parameters_of_vllms(told: dict[str, Any]) -> None:
    assert told["hooks"] == []


def test_only_what_is_fine_is_published(told: dict[str, Any]) -> None:
    assert told["publishing"] == {
        "fine": 1,
        "not finite": 1,
        "too large": 1,
        "of another dtype": 2,
        "published again": 2,
        "staged": 0,
    }
    assert "not finite" in told["log"] and "raise arena_bytes (131072 now)" in told["log"]


def test_a_load_that_fails_fails_its_requests_and_heals(told: dict[str, Any]) -> None:
    assert told["a load that fails"] == {
        "report": True,
        "zeros": True,
        "unavailable": ["first"],
        "nothing scheduled": ["item"],
        "report of the second": False,
        "right": True,
        "unavailable then": [],
        "third load": [],
    }


def test_settings_that_cannot_work_are_refused_at_start(told: dict[str, Any]) -> None:
    too_small, unknown, no_number, shm = told["refused settings"]
    assert "arena_bytes" in too_small and "65536" in too_small
    assert "`arena`" in unknown and "arena_dir, arena_bytes, wait_s" in unknown
    assert "wait_s" in no_number
    assert "--mm-processor-cache-type shm" in shm
