"""Fixtures of the tests on real vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from deployment import SMALL_MODEL, Deployment, Deployments


@pytest.fixture(scope="session")
async def deployments(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployments]:
    running = Deployments(tmp_path_factory.mktemp("deployments"))
    yield running
    await running.stop()


@pytest.fixture
async def small(deployments: Deployments) -> Deployment:
    """The trained model."""
    return await deployments.get(SMALL_MODEL.name)
