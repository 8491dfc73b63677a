"""Supervising what `epd up` started, with a real broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from epd_cli.brokers import BrokerError, Brokers, embedded_brokers
from epd_cli.stack import Stack, StackOptions
from service_stack import eventually


def stack_of(brokers: Brokers, folder: Path) -> Stack:
    options = StackOptions(model="none", state_dir=folder)
    return Stack(options, brokers.nats_url, "", "", [], [], folder, [brokers.nats])


async def test_a_broker_that_dies_is_started_again(tmp_path: Path) -> None:
    async with embedded_brokers(tmp_path, redis=False) as brokers:
        stop, said = asyncio.Event(), list[str]()
        url, pid = brokers.nats_url, brokers.nats.pid
        supervising = asyncio.create_task(stack_of(brokers, tmp_path).supervise(stop, said.append))
        await asyncio.sleep(0)
        await brokers.nats.kill()
        await eventually(lambda: brokers.nats.running and brokers.nats.pid != pid, "a new server")
        assert brokers.nats_url == url
        assert "NATS ended" in said[0]
        stop.set()
        async with asyncio.timeout(10):
            await supervising


async def test_a_broker_that_cannot_be_started_again_ends_the_stack(tmp_path: Path) -> None:
    async with embedded_brokers(tmp_path, redis=False) as brokers:
        supervising = asyncio.create_task(
            stack_of(brokers, tmp_path).supervise(asyncio.Event(), lambda text: None)
        )
        await asyncio.sleep(0)
        brokers.nats.binary = tmp_path / "nothing"
        await brokers.nats.kill()
        with pytest.raises(BrokerError, match="cannot run"):
            async with asyncio.timeout(10):
                await supervising
