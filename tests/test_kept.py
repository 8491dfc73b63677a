"""What an engine keeps of prompts, from what becomes of its blocks; and how its service hears of it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from epd_common.kept import MOST_KEPT, BlockWatch, Kept
from epd_sim.prefix_cache import BLOCK_TOKENS, PrefixCache
from epd_vllm.kept_pipe import LINE_KEYS, KeptReader, KeptWriter
from service_stack import eventually


class Watched:
    """A watch, and what it told."""

    def __init__(self, most: int = 100) -> None:
        self.kept = Kept()
        self.watch = BlockWatch(self.kept.note, most=most)

    def fill(self, *blocks: int, **ends: int) -> None:
        self.watch.stored(blocks)
        self.watch.prefilled(ends.items())


# -- the watch ------------------------------------------------------------------------------------


def test_a_beginning_is_kept_while_the_block_is_in_which_it_ends() -> None:
    made = Watched()
    made.fill(1, 2, 3, system=1, turn=3)
    assert made.kept.keys == {"system", "turn"}
    made.watch.removed([2])
    assert made.kept.keys == {"system", "turn"}, "another's end"
    made.watch.removed([3])
    assert made.kept.keys == {"system"} and made.watch.kept == ["system"]
    made.fill(3, turn=3)
    assert made.kept.keys == {"system", "turn"}
    made.watch.cleared()
    assert made.kept.keys == set() and made.watch.kept == []


def test_what_ends_in_a_block_that_is_not_stored_is_not_kept() -> None:
    made = Watched()
    made.watch.prefilled([("turn", 1)])
    assert made.kept.keys == set() and made.watch.kept == []


def test_a_block_that_was_made_twice_goes_with_its_last_copy() -> None:
    made = Watched()
    made.fill(1, turn=1)
    made.fill(1, turn=1)
    made.watch.removed([1])
    assert made.kept.keys == {"turn"}
    made.watch.removed([1])
    assert made.kept.keys == set()


def test_a_beginning_that_comes_to_end_elsewhere_is_kept_by_its_new_end() -> None:
    made = Watched()
    made.fill(1, 2, turn=1)
    made.fill(turn=2)
    made.watch.removed([1])
    assert made.kept.keys == {"turn"}
    made.watch.removed([2])
    assert made.kept.keys == set()


def test_the_least_recently_used_beginnings_are_told_of_no_more() -> None:
    made = Watched(most=2)
    made.fill(1, 2, 3, a=1, b=2)
    made.fill(a=1)
    made.fill(c=3)
    assert made.kept.keys == {"a", "c"}
    made.watch.removed([2])
    assert made.watch.kept == ["a", "c"]


def test_changes_are_taken_once_and_what_went_at_once_is_gone() -> None:
    kept = Kept()
    calls: list[int] = []
    kept.changed = lambda: calls.append(1)
    kept.note(["a", "b"], [])
    kept.note([], ["b"])
    assert kept.take() == (["a"], ["b"])
    assert kept.take() == ([], [])
    kept.note(["b"], ["a"])
    kept.note(["a"], [])
    assert kept.take() == (["a", "b"], [])
    kept.clear()
    assert kept.take() == ([], ["a", "b"]) and len(calls) == 5


def test_the_simulated_cache_tells_what_it_stores_and_removes() -> None:
    made = Watched()
    cache = PrefixCache(3 * BLOCK_TOKENS, made.watch)
    cache.keep([b"1", b"2"])
    made.watch.prefilled([("a", b"2")])
    cache.keep([b"1", b"2", b"3"])
    cache.keep([b"1", b"2", b"3"])
    assert made.kept.keys == {"a"}
    cache.keep([b"4"])
    assert made.kept.keys == {"a"}, "the end went first"
    cache.keep([b"5"])
    assert made.kept.keys == set()


# -- the pipe -------------------------------------------------------------------------------------


class Pipe:
    def __init__(self, path: Path) -> None:
        self.engine: list[str] = []
        self.kept = Kept()
        self.reader = KeptReader(self.kept)
        self.reader.open(path)
        self.writer = KeptWriter(path, lambda: self.engine)
        path.unlink()

    def told(self, added: list[str], gone: list[str]) -> None:
        self.engine = [key for key in [*self.engine, *added] if key not in gone]
        self.writer.told(added, gone)

    async def same(self) -> None:
        await eventually(lambda: self.kept.keys == set(self.engine), "the service knows the same")


@pytest.fixture
async def pipe(tmp_path: Path) -> AsyncIterator[Pipe]:
    made = Pipe(tmp_path / "pipe")
    yield made
    made.reader.close()
    assert made.kept.keys == set(), "who tells no more keeps nothing"


async def test_a_change_comes_through_the_pipe(pipe: Pipe) -> None:
    pipe.told(["a", "b"], [])
    pipe.told(["c"], ["a"])
    await pipe.same()
    pipe.told([f"{n:016x}" for n in range(MOST_KEPT)], [])
    await pipe.same()
    assert LINE_KEYS * 17 + 2 <= 4096


async def test_a_pipe_that_was_full_is_begun_anew(pipe: Pipe) -> None:
    """The service's loop does not run meanwhile, as in a service that is stopped for a while."""
    pipe.told(["first"], [])
    for n in range(3 * MOST_KEPT):
        pipe.told([f"{n:016x}"], [f"{n - 9:016x}"])

    def told_once_more() -> bool:
        pipe.told([], [])
        return pipe.kept.keys == set(pipe.engine)

    await eventually(told_once_more, "the service knows the same")


async def test_the_engine_goes_on_when_its_service_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "gone"
    os.mkfifo(path)
    end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    writer = KeptWriter(path, lambda: [])
    os.close(end)
    writer.told(["a"], [])
