"""Encoder and PD worker on nodes of their own: embeddings come out of the encoder's memory by NIXL."""

from __future__ import annotations

import itertools

import pytest
from answers import ask
from cases import CaseMaker
from deployment import SMALL_MODEL, Deployments
from services import counters

pytestmark = [pytest.mark.vllm, pytest.mark.extra, pytest.mark.timeout(900)]


async def test_embeddings_by_nixl_give_the_answers_of_one_process(deployments: Deployments) -> None:
    deployment = await deployments.get(SMALL_MODEL.name, "nodes apart")
    for case in itertools.islice(CaseMaker(57).all(), 24):
        theirs = await ask(deployment.colocated_url, deployment.name, case.messages, stream=False)
        ours = await ask(deployment.url, deployment.name, case.messages, stream=case.stream)
        assert ours.ids == theirs.ids, case.title
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3), case.title
    found = await counters(deployment, "pd-1")
    encoded = (await counters(deployment, "encoder-1"))["encoded"]
    assert found["nixl_fetches"] == encoded > 20
    assert found.get("redis_fetches", 0) == 0
    failed = {name: n for name, n in found.items() if name.startswith("nixl_failed") and n}
    assert not failed and not found.get("integrity_faults", 0)
