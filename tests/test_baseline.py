"""The simulated vLLM servers of the comparison, and vLLM's own proxy in front of them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.baseline.measure import Measurement, Plan, compare, measure
from bench.baseline.sim_server import make_app
from bench.baseline.systems import SYSTEMS, Shape, System
from bench.compare import main as compare_main
from bench.vllm_source import PROXY, SourceError, fetch
from epd_bench.builtin import RandomMm, find_workload
from epd_bench.options import Pace
from epd_bench.quantiles import quantiles
from epd_bench.slo import parse_slo
from epd_bench.summary import Summary
from epd_sim.answers import expected_answer
from service_stack import CHAT, image_part, picture, request_body, stream_text, text_of

Servers = dict[str, httpx.AsyncClient]


@contextlib.asynccontextmanager
async def server(role: str, arena: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A server in this process."""
    app = make_app(
        argparse.Namespace(
            role=role,
            arena=arena,
            arena_bytes=64 << 20,
            name=f"{role}-{secrets.token_hex(3)}",
            model="sim",
            profile="instant",
            time_scale=1.0,
            slow_factor=1.0,
            max_num_seqs=8,
            decodes=True,
        )
    )
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://sim") as client,
    ):
        yield client


async def encode(encoder: httpx.AsyncClient, *pictures: bytes) -> list[dict[str, Any]]:
    """What the proxy sends to an encoder; the references that it makes of the answer."""
    parts = [{**image_part(data), "uuid": hashlib.sha256(data).hexdigest()} for data in pictures]
    response = await encoder.post(
        CHAT, json={"model": "sim", "messages": [{"role": "user", "content": parts}]}
    )
    assert response.status_code == 200, response.text
    told = response.json()["ec_transfer_params"]
    by_index = {i: key for key, entry in told.items() for i in entry["item_indices"]}
    return [
        {
            "type": "image_embeds",
            "image_embeds": told[by_index[index]]["metadata"],
            "uuid": by_index[index],
        }
        for index in range(len(pictures))
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_is_that_of_our_own_engine(tmp_path: Path, stream: bool) -> None:
    first, second = picture((56, 84)), picture((28, 28))
    body = request_body("sim", "what?", first, second, first, stream=stream, max_tokens=30)
    async with server("encoder", tmp_path) as encoder, server("pd", tmp_path) as pd:
        references = await encode(encoder, first, second, first)
        sent = {
            **body,
            "messages": [
                {"role": "user", "content": [*references, body["messages"][0]["content"][-1]]}
            ],
        }
        response = await pd.post(CHAT, json=sent)
        assert response.status_code == 200, response.text
        found = stream_text(response.text) if stream else text_of(response)
        assert (await encoder.get("/counts")).json()["encoded"] == 2
    assert found == expected_answer(body, [first, second, first])


async def test_colocated_server_gives_the_same_answer(tmp_path: Path) -> None:
    media = [picture((56, 28)), picture((28, 28))]
    body = request_body("sim", "what?", *media, max_tokens=20)
    async with server("colocated", tmp_path) as both:
        response = await both.post(CHAT, json=body)
        assert text_of(response) == expected_answer(body, media)
        again = await both.post(CHAT, json=body)
        assert text_of(again) == text_of(response)
        assert (await both.get("/counts")).json()["encoded"] == 2, "the second time none"


async def test_missing_embedding_is_500_and_the_next_request_is_answered(tmp_path: Path) -> None:
    async with server("encoder", tmp_path) as encoder, server("pd", tmp_path) as pd:
        (reference,) = await encode(encoder, picture())
        text = {"type": "text", "text": "what?"}
        lost = {**reference, "uuid": "0" * 64}
        for part, status in ((lost, 500), (reference, 200)):
            message = {"role": "user", "content": [part, text]}
            response = await pd.post(CHAT, json={"model": "sim", "messages": [message]})
            assert response.status_code == status, response.text
        assert not list((tmp_path / "pins").rglob("*/*")), "what is used no more is not held"


async def test_encoder_joins_what_is_under_way_and_other_encoders_do_not(tmp_path: Path) -> None:
    data = picture()
    async with server("encoder", tmp_path) as one, server("encoder", tmp_path) as other:
        await asyncio.gather(*(encode(encoder, data) for encoder in (one, one, one, other)))
        counts = [(await encoder.get("/counts")).json() for encoder in (one, other)]
    assert [count["encode_calls"] for count in counts] == [3, 1]
    assert [count["encoded"] for count in counts] == [1, 1]


async def test_broken_picture_is_400(tmp_path: Path) -> None:
    for role in ("encoder", "colocated"):
        async with server(role, tmp_path / role) as one:
            whole = picture((64, 64))
            body = request_body("sim", "what?", whole[: len(whole) // 2])
            response = await one.post(CHAT, json=body)
            assert response.status_code == 400, response.text
    async with server("pd", tmp_path / "pd") as pd:
        response = await pd.post(CHAT, json=request_body("sim", "what?", picture()))
        assert response.status_code == 400 and "references" in response.text


def measurement(system: str, number: int, ttft_s: float, failed: int = 0) -> Measurement:
    summary = Summary(
        sent=1,
        answered=1,
        failures={"500": failed} if failed else {},
        lasted_s=1.0,
        requests_per_s=1.0,
        output_tokens_per_s=1.0,
        ttft=quantiles([ttft_s]),
        tpot=quantiles([]),
        itl=quantiles([]),
        e2e=quantiles([]),
        sent_bytes=0,
        received_bytes=0,
        output_tokens=0,
        images=0,
        distinct_images=0,
        slo="",
        slo_share=0.0,
        without_usage=0,
    )
    return Measurement(system=system, round=number, seed=number, summary=summary)


def test_ratios_are_taken_round_by_round() -> None:
    times = {"ours": (1.0, 4.0, 2.0), "proxy": (2.0, 2.0, 8.0)}
    found = [
        measurement(system, number, ttft_s, failed=number if system == "proxy" else 0)
        for system, of_one in times.items()
        for number, ttft_s in enumerate(of_one)
    ]
    rows = {row.name: row for row in compare(found, ["ours", "proxy"])}
    row = rows["TTFT p50, s"]
    assert row.medians == {"ours": 2.0, "proxy": 2.0}
    assert row.ratios == {"proxy": (0.5, 0.25, 2.0)}
    assert rows["failed requests"].ratios == {"proxy": None}, (
        "nothing can be divided by no failures"
    )
    assert rows["failed requests"].medians == {"ours": 0.0, "proxy": 1.0}
    assert "TPOT p50, s" not in rows, "which nobody has"


def proxy_or_skip() -> None:
    try:
        fetch(Shape().vllm_version)
    except SourceError as error:
        pytest.skip(f"vLLM's source distribution is not to be had here: {error}")
    assert PROXY


async def asked(system: System, count: int) -> list[tuple[str, str]]:
    """Answers of a system, and the right ones."""

    async def ask(client: httpx.AsyncClient, number: int) -> tuple[str, str]:
        media = [picture((56, 28)) for _ in range(number % 4)]
        stream = number % 2 == 0
        body = request_body("sim", f"{number}?", *media, max_tokens=9, stream=stream)
        response = await client.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        found = stream_text(response.text) if stream else text_of(response)
        return found, expected_answer(body, media)

    url = system.url.split(",")[0]
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        return list(await asyncio.gather(*(ask(client, number) for number in range(count))))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SYSTEMS, "dynamic"])
async def test_every_system_gives_the_right_answers(name: str) -> None:
    shape = Shape(encoders=2, pds=2, profile="instant", dynamic=name == "dynamic")
    if name in ("proxy", "dynamic"):
        await asyncio.to_thread(proxy_or_skip)
    async with SYSTEMS["proxy" if name == "dynamic" else name](shape) as system:
        answers = await asked(system, 24)
        assert [found for found, _ in answers] == [right for _, right in answers]
        reading = await system.read()
        assert reading.counts["encoded"] == sum(number % 4 for number in range(24))
        assert all(pid for pids in system.pids.values() for pid in pids)


@pytest.mark.slow
async def test_proxy_fails_without_one_of_its_encoders_and_ours_does_not() -> None:
    await asyncio.to_thread(proxy_or_skip)
    shape = Shape(encoders=2, pds=1, profile="instant")
    body = request_body("sim", "what?", picture(), picture(), max_tokens=3)
    statuses = {}
    for name in ("ours", "proxy"):
        async with (
            SYSTEMS[name](shape) as system,
            httpx.AsyncClient(base_url=system.url, timeout=60) as client,
        ):
            system.kill_encoder()
            statuses[name] = (await client.post(CHAT, json=body)).status_code
            assert (await system.read()).counts["encoded"] > 0, "of those that live"
    assert statuses == {"ours": 200, "proxy": 502}


@pytest.mark.slow
async def test_encoder_killed_in_the_middle_of_a_measurement() -> None:
    await asyncio.to_thread(proxy_or_skip)
    plan = Plan(
        shape=Shape(encoders=2, pds=1, profile="instant"),
        workload=find_workload("random-mm", RandomMm(sizes="56x56", text=10, output=3)),
        slo=parse_slo("default"),
        pace=Pace(rate=20.0, requests=60),
        search=None,
        timeout_s=30.0,
        kill_encoder=True,
    )
    ours, proxy = [await measure(plan, name, 0, 1) for name in ("ours", "proxy")]
    assert ours.summary is not None and proxy.summary is not None
    assert not ours.summary.failures and ours.summary.answered == 60
    assert 5 < sum(proxy.summary.failures.values()) < 30, "each second one from the middle on"
    assert ours.use is not None and ours.use.cpu_s["gateway"] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--rate", "1", "--goodput"), "exclude each other"),
        (("--rounds", "0"), "--rounds must be above 0"),
        (("--kill-encoder", "--encoders", "1"), "needs two encoders"),
        (("--systems", "ours,theirs"), "there is no theirs"),
        (("--workload", "nix"), "no workload 'nix'"),
        (("--model", "nix"), "nix has no config.json"),
        (("--model", "models/shapes-qwen2vl", "--slow-encoder", "5"), "for simulated engines"),
    ],
)
def test_comparison_refuses_nonsense(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    told: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare", *arguments])
    assert compare_main() == 2
    assert told in capsys.readouterr().err
