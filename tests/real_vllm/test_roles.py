"""PD workers that encode: as their own work, or where encoders fail. Same answers as colocated."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import signal
import time
from pathlib import Path

import httpx
import pytest
from answers import ask
from cases import CaseMaker, picture, text, user
from deployment import PATIENCE_S, SMALL_MODEL, Deployment, Deployments
from prometheus_client.parser import text_string_to_metric_families
from services import counters, frozen_encoder

from epd_cli.stack import StackOptions, run_stack
from epd_common.client import CHAT
from models import shapes

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


async def same_as_colocated(deployment: Deployment, seed: int, count: int) -> int:
    """Ask so many questions; how many items were encoded for them."""
    before = (await counters(deployment, "pd-1")).get("encoded", 0)
    for case in itertools.islice(CaseMaker(seed).all(), count):
        theirs = await ask(deployment.colocated_url, deployment.name, case.messages, stream=False)
        ours = await ask(deployment.url, deployment.name, case.messages, stream=case.stream)
        assert ours.ids == theirs.ids, case.title
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3), case.title
    return (await counters(deployment, "pd-1")).get("encoded", 0) - before


async def test_fc12_one_process_encodes_and_decodes(deployments: Deployments) -> None:
    """Of role ``ec_both``, alone; with pictures that its engine has in its own caches, and evicted ones."""
    deployment = await deployments.get(SMALL_MODEL.name, "both")
    assert [service.role for service in deployment.stack.services] == ["gateway", "pd"]
    assert await same_as_colocated(deployment, seed=41, count=44) > 60
    assert await same_as_colocated(deployment, seed=41, count=8) == 0  # all are there
    for path in (deployment.stack.arena / "data").iterdir():
        path.unlink()
    assert await same_as_colocated(deployment, seed=41, count=8) > 0  # written again
    assert list((deployment.stack.arena / "staging" / "pd-1").iterdir()) == []


async def test_a_worker_shows_vllm_s_metrics_and_its_batches(deployments: Deployments) -> None:
    """Of the engine that answers and encodes in one: only encodes count as batches."""
    deployment = await deployments.get(SMALL_MODEL.name, "both")
    encoded = await same_as_colocated(deployment, seed=42, count=8)
    async with httpx.AsyncClient() as client:
        page = await client.get(f"http://127.0.0.1:{deployment.metrics_port}/metrics")
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
        if not sample.labels or sample.name.startswith("vllm:")
    }
    made = (await counters(deployment, "pd-1"))["encoded"]
    assert found["epd_encoder_batch_items_sum"] == made >= encoded > 4
    assert 0 < found["epd_encoder_batch_items_count"] <= made
    assert found["vllm:prompt_tokens_total"] > 0
    assert 0 <= found["vllm:kv_cache_usage_perc"] < 1
    assert found["epd_pd_engine_steps_total"] > found["epd_encoder_batch_items_count"]


LONG_TEXT = "Look at this picture closely, as there will be a question about it afterwards. " * 20


async def test_fc19_what_waits_inside_makes_way_for_the_encode_it_waits_for(
    deployments: Deployments,
) -> None:
    """Requests that entered early hold nearly all of the KV cache, and their pictures are encoded there."""
    deployment = await deployments.get(SMALL_MODEL.name, "both, little memory")
    rng = random.Random(46)

    def question() -> dict[str, object]:
        uri = shapes.data_uri(shapes.draw(shapes.random_scene(rng), 112, 140, rng))
        part = {"type": "image_url", "image_url": {"url": uri}}
        content = [text(LONG_TEXT), part, text("What is in image #1?")]
        messages = [{"role": "user", "content": content}]
        return {"model": deployment.name, "messages": messages, "max_tokens": 8}

    hello = {"model": deployment.name, "messages": [user(text("Hello."))], "max_tokens": 4}
    async with httpx.AsyncClient(base_url=deployment.url, timeout=60) as client:
        assert (
            await client.post(CHAT, json=question())
        ).status_code == 200  # its size is known now
        for _ in range(3):
            bodies = [*(question() for _ in range(8)), hello]
            started = time.monotonic()
            responses = await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
            assert [response.status_code for response in responses] == [200] * 9
            assert time.monotonic() - started < 20


async def test_fc07_pd_encodes_what_a_hanging_encoder_does_not(deployments: Deployments) -> None:
    deployment = await deployments.get(SMALL_MODEL.name, "rescue")
    assert await same_as_colocated(deployment, seed=42, count=4) == 0  # the encoder's work
    async with frozen_encoder(deployment):
        started = time.monotonic()
        assert await same_as_colocated(deployment, seed=43, count=1) == 1
        waited_s = time.monotonic() - started
        assert PATIENCE_S <= waited_s < PATIENCE_S + 3
    assert (await counters(deployment, "pd-1"))["encoded_here"] == 1


async def test_pd_encodes_at_once_where_no_encoder_is_left(deployments: Deployments) -> None:
    deployment = await deployments.get(SMALL_MODEL.name, "rescue")
    (encoder,) = (s for s in deployment.stack.services if s.role == "encoder")
    encoder.signal(signal.SIGTERM)
    await encoder.wait()
    started = time.monotonic()
    assert (
        await same_as_colocated(deployment, seed=44, count=18) == 63
    )  # 1 to 6 images, three times
    assert time.monotonic() - started < 18 * PATIENCE_S / 2
    async with httpx.AsyncClient(base_url=deployment.url) as client:
        assert (await client.get("/ready")).status_code == 200


BFLOAT16_NAN = b"\xc0\x7f"


def with_nan(folder: Path) -> Path:
    """The trained model with one number of its vision tower broken."""
    model = shutil.copytree(SMALL_MODEL, folder / "nan")
    (weights,) = model.glob("*.safetensors")
    with weights.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(size))
        name = next(name for name in tensors if name.endswith("merger.mlp.2.bias"))
        assert tensors[name]["dtype"] == "BF16"
        file.seek(8 + size + tensors[name]["data_offsets"][0])
        file.write(BFLOAT16_NAN)
    return model


async def test_values_that_are_not_finite_end_one_request(
    deployments: Deployments, tmp_path: Path
) -> None:
    await deployments.stop()
    options = StackOptions(
        model=str(with_nan(tmp_path)),
        served_model="nan",
        encoders=0,
        port=0,
        state_dir=tmp_path / "state",
    )
    rng = random.Random(45)
    scene, part = picture(rng)
    asked = shapes.ask(rng, [scene])
    async with (
        run_stack(options, lambda view: None) as stack,
        httpx.AsyncClient(base_url=stack.gateway_url, timeout=60) as client,
    ):
        for _ in range(2):
            body = {"model": "nan", "messages": [user(part, text(asked.text))]}
            response = await client.post(CHAT, json=body)
            assert response.status_code == 502
            error = response.json()["error"]
            assert (error["code"], error["stage"]) == ("encode_failed", "encode")
            assert "not finite" in error["message"] and error["key"] in error["message"]
            body = {"model": "nan", "messages": [user(text("Hello."))], "max_tokens": 4}
            assert (await client.post(CHAT, json=body)).status_code == 200
        assert list((stack.arena / "data").iterdir()) == []
        assert list((stack.arena / "staging" / "pd-1").iterdir()) == []
