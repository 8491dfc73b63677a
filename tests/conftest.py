"""Fixtures that every test file shares: real brokers, started once for the session."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from epd_cli.brokers import Brokers, embedded_brokers


@pytest.fixture(scope="session")
async def brokers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Brokers]:
    """A real NATS and a real Valkey. Tests share them: use names of your own, or clean up."""
    async with embedded_brokers(tmp_path_factory.mktemp("brokers")) as running:
        yield running
        # It has thousands of consumers by now, and takes long to end in order, which nobody needs.
        await running.nats.kill()


@pytest.fixture(scope="session")
def nats_url(brokers: Brokers) -> str:
    return brokers.nats_url


@pytest.fixture(scope="session")
def redis_url(brokers: Brokers) -> str:
    return brokers.redis_url
