"""An arena whose file system is smaller than its quota, or is filled by others."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epd_common.errors import UnavailableError
from epd_common.store import Arena, StoreFullError
from epd_common.store import room as room_module
from epd_common.store.room import ArenaFullError, write_whole
from fake_engine import answer_text
from service_stack import picture, service_stack, text_of
from small_tmpfs import on_small_tmpfs

KEY = "a" * 64
MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["arena", "sim", "vllm"])
def test_a_full_file_system_makes_room_again(tmp_path: Path, writer: str) -> None:
    """A real tmpfs of 8 MiB, of which another has 5, for an arena that may hold 1 GiB."""
    script = Path(__file__).with_name("arena_on_small_tmpfs.py")
    command = [sys.executable, str(script), writer, str(tmp_path / "shm")]
    run = subprocess.run(
        on_small_tmpfs(tmp_path / "shm", 8 * MIB, command),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    facts = json.loads(run.stdout.splitlines()[-1])
    assert facts["quota_bytes"] == 7 * MIB, "what fits, and a share for what is being written"
    assert "EPD_ARENA_BYTES=1073741824 is more than the file system" in run.stderr
    assert facts["kept"] >= 4 and facts["newest_kept"], "the least recently used went first"
    assert facts["all_pinned"] == "full" and "give its tmpfs more room" in facts["message"]
    assert facts["kept_though_full"] == facts["kept"], "nothing is evicted in vain"
    assert facts["unfinished"] == []
    assert facts["kept_at_last"] == facts["kept"], "one for one"
    assert facts["kept_with_room"] == facts["kept"] + 5


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena(tmp_path / "arena", quota_bytes=MIB, worker="w")
    made.open()
    yield made
    made.close()


class Full:
    """A file system of so many free bytes, whose every write fails while ``broken`` says with what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.broken = 0
        monkeypatch.setattr(room_module, "_file_system", lambda _: (1 << 40, self.free_bytes))
        monkeypatch.setattr("builtins.open", self._open(open))

    def _open(self, real: Any) -> Any:
        def opened(path: Any, mode: str = "r", **more: Any) -> Any:
            file = real(path, mode, **more)
            if self.broken and mode == "wb":
                file.write(b"the beginning")
                file.close()
                raise OSError(self.broken, os.strerror(self.broken))
            return file

        return opened


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_that_finds_no_room_leaves_nothing(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    full = Full(monkeypatch, free_bytes=MIB)
    full.broken = code
    with pytest.raises(ArenaFullError, match="give its tmpfs more room") as caught:
        write_whole(arena.staging / "x", b"1234", key=KEY)
    assert isinstance(caught.value, UnavailableError), "so that its worker steps back"
    assert isinstance(caught.value, StoreFullError)
    assert (caught.value.status, caught.value.code, caught.value.key) == (503, "store_full", KEY)
    assert caught.value.retry_after_s == 1.0
    assert os.listdir(arena.staging) == []


def test_other_failures_pass_and_leave_nothing(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Full(monkeypatch, free_bytes=MIB)
    full.broken = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        write_whole(arena.staging / "x", b"1234", key=KEY)
    assert os.listdir(arena.staging) == []


def test_what_others_fill_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Full(monkeypatch, free_bytes=MIB // 2)
    arena = Arena(tmp_path / "arena", quota_bytes=MIB, worker="w")
    with caplog.at_level(logging.WARNING):
        arena.open()
    assert arena.quota_bytes == MIB, "they may go again"
    assert "others fill it" in caplog.text
    arena.close()


@pytest.mark.slow
async def test_fc28_an_arena_that_is_full_for_a_while_costs_time_alone(
    nats_url: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder steps back and its job waits: no 502, no dead letter."""
    async with service_stack(nats_url, redis_url, tmp_path) as stack:
        data, refusals = picture(), 0
        adopt = Arena.adopt

        def refused(self: Arena, *args: Any) -> None:
            nonlocal refusals
            refusals += 1
            if refusals <= 2:
                raise ArenaFullError("no room on this node")
            adopt(self, *args)

        monkeypatch.setattr("epd_common.store.arena.Arena.adopt", refused)
        assert text_of(await stack.ask("patience", data)) == answer_text("patience", data)
        assert refusals == 3
        counters = await stack.counters(stack.encoders[0])
        assert counters["given_back"] == 2 and not counters.get("failed")
