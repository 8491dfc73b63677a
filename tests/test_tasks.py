"""Ending tasks, and finishing what must not be left half done."""

from __future__ import annotations

import asyncio

import pytest

from epd_common.tasks import end, whole


async def test_what_is_begun_is_finished_before_the_cancel_counts() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()
    done: list[str] = []

    async def work() -> None:
        started.set()
        await go_on.wait()
        done.append("work")

    async def wait() -> None:
        try:
            await whole(work())
        finally:
            done.append("left")

    task = asyncio.create_task(wait())
    await started.wait()
    ending = asyncio.create_task(end(task))  # which cancels again and again
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0.01)
    assert done == []
    go_on.set()
    await ending
    assert done == ["work", "left"]
    assert task.cancelled()


async def test_who_ends_tasks_waits_for_them_however_often_it_is_asked_to_end() -> None:
    """As a request does, which gives its pins back once the tasks that took them are over."""
    started, go_on = asyncio.Event(), asyncio.Event()
    done: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            started.set()
            try:
                await whole(go_on.wait())
            finally:
                done.append("work")

    working = asyncio.create_task(work())
    await asyncio.sleep(0)

    async def request() -> None:
        try:
            await end(working)
        finally:
            done.append("request")

    task = asyncio.create_task(request())
    await started.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
    assert done == []
    go_on.set()
    await asyncio.wait((task,))
    assert done == ["work", "request"] and task.cancelled()


async def test_a_failure_after_a_cancel_is_not_raised() -> None:
    started = asyncio.Event()

    async def fail() -> None:
        started.set()
        await asyncio.sleep(0.01)
        raise RuntimeError("too late to matter")

    task = asyncio.create_task(whole(fail()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_results_and_failures_come_through() -> None:
    async def give(value: int) -> int:
        if not value:
            raise ValueError("nothing")
        return value

    assert await whole(give(3)) == 3
    with pytest.raises(ValueError, match="nothing"):
        await whole(give(0))
