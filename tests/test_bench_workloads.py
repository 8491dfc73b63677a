"""The load harness's workloads: their shapes, that a seed gives them again, and how they are sent."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from epd_bench.arrivals import arrival_times
from epd_bench.bodies import BodyMaker
from epd_bench.builtin import AZURE_CAP, BUILTIN, NAMES, RandomMm, find_workload
from epd_bench.distributions import Distribution
from epd_bench.errors import BenchError
from epd_bench.pictures import PictureMaker
from epd_bench.workloads import Picture, Request, Workload, generate
from epd_common.decoding.pictures import decode
from epd_sim.prompts import chat_prompt

SEED = 7


def some(name: str, count: int = 2000, **parameters: Any) -> list[Request]:
    workload = find_workload(name, RandomMm(**parameters))
    return list(itertools.islice(generate(workload, SEED), count))


@pytest.mark.parametrize("name", NAMES)
def test_seed_gives_the_same_requests_and_bodies(name: str) -> None:
    def bodies(seed: int) -> list[bytes]:
        requests = itertools.islice(generate(find_workload(name, RandomMm()), seed), 12)
        return list(map(BodyMaker("m", seed, {}).body, requests))

    assert bodies(SEED) == bodies(SEED)
    assert bodies(SEED) != bodies(SEED + 1)


@pytest.mark.parametrize("name", NAMES)
def test_body_is_a_chat_of_the_tokens_that_were_asked_for(name: str) -> None:
    maker = BodyMaker('a "model"', SEED, {"ignore_eos": True})
    for request in some(name, 8):
        body = json.loads(maker.body(request))
        assert body["model"] == 'a "model"'
        assert body["stream"] and body["stream_options"] == {"include_usage": True}
        assert body["ignore_eos"] is True and body["max_tokens"] == request.output_tokens
        assert [message["role"] for message in body["messages"]] == [t.role for t in request.turns]
        for message, turn in zip(body["messages"], request.turns, strict=True):
            content = message["content"]
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            assert len(parts) == len(turn.pictures) + 1
            assert abs(len(parts[-1]["text"]) - 4 * turn.text_tokens) <= 4 * 4
        assert chat_prompt(body["messages"])


def test_text_differs_from_request_to_request() -> None:
    maker = BodyMaker("m", SEED, {})
    texts = [json.loads(maker.body(r))["messages"][0]["content"] for r in some("text", 200)]
    assert len({text.split()[0] for text in texts}) == 200, "no prefix is shared"


def test_azure_has_the_published_shares() -> None:
    requests = some("azure", 8000)
    counts = [len(request.pictures) for request in requests]
    with_images = [count for count in counts if count]
    assert abs(len(with_images) / len(counts) - 0.5) < 0.03
    for most, share in ((1, 0.66), (4, 0.71), (9, 0.86), (AZURE_CAP - 1, 0.92)):
        found = sum(count <= most for count in with_images) / len(with_images)
        assert abs(found - share) < 0.03, most
    assert max(counts) == AZURE_CAP
    texts = [r.turns[0].text_tokens for r in requests if not r.pictures]
    assert 700 < statistics.median(texts) < 900
    assert 70 < statistics.median(request.output_tokens for request in requests) < 90


def test_chat_sends_each_picture_five_times() -> None:
    sent = [picture for request in some("chat") for picture in request.pictures]
    repeated = 1 - len(set(sent)) / len(sent)
    assert abs(repeated - 0.8) < 0.01
    longest = max(some("chat", 200), key=lambda request: len(request.turns))
    assert [turn.role for turn in longest.turns] == ["user", "assistant"] * 4 + ["user"]


def test_one_picture_is_one() -> None:
    assert (
        len({picture for request in some("one-picture", 64) for picture in request.pictures}) == 1
    )
    assert BUILTIN["one-picture"].users == 64


def test_random_mm_follows_its_parameters() -> None:
    requests = some("random-mm", images=4, sizes="64x64:3,128x32:1", text=100, spread=0.5)
    assert {len(request.pictures) for request in requests} == set(range(2, 7))
    assert {request.turns[0].text_tokens for request in requests} == set(range(50, 151))
    sizes = Counter((p.width, p.height) for request in requests for p in request.pictures)
    assert set(sizes) == {(64, 64), (128, 32)}
    assert 2.5 < sizes[64, 64] / sizes[128, 32] < 3.5
    pictures = [picture for request in requests for picture in request.pictures]
    assert len(set(pictures)) == len(pictures), "each is one that nobody has sent"


def test_pictures_are_valid_and_their_own_in_bytes_and_pixels() -> None:
    maker = PictureMaker(SEED)
    pictures = [Picture(120, 45, number) for number in range(300)]
    files = [maker.data(picture) for picture in pictures]
    assert len(set(files)) == len(files)
    seen = set()
    for picture, data in zip(pictures, files, strict=True):
        found = decode(data, 10_000)
        assert (found.width, found.height) == (120, 45)
        head, tail = maker.uri(picture)
        assert base64.b64decode((head + tail).removeprefix(b"data:image/jpeg;base64,")) == data
        with Image.open(io.BytesIO(data)) as image:
            seen.add(image.tobytes())
    assert len(seen) == len(files)
    assert PictureMaker(SEED + 1).data(pictures[0]) != files[0]
    assert maker.data(pictures[0]) == files[0]


@pytest.mark.parametrize(
    ("burstiness", "least", "most"), [(1.0, 0.9, 1.1), (0.25, 1.7, 2.3), (16.0, 0.2, 0.3)]
)
def test_arrivals_have_the_rate_and_the_spread(
    burstiness: float, least: float, most: float
) -> None:
    times = list(itertools.islice(arrival_times(20.0, burstiness, SEED), 5000))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *times])]
    assert abs(statistics.fmean(gaps) * 20.0 - 1) < 0.08
    assert least < statistics.stdev(gaps) / statistics.fmean(gaps) < most
    assert times == list(itertools.islice(arrival_times(20.0, burstiness, SEED), 5000))
    assert times != list(itertools.islice(arrival_times(20.0, burstiness, SEED + 1), 5000))


def test_log_normal_has_its_quantiles() -> None:
    rng = random.Random(SEED)
    distribution = Distribution(p50=800, p90=4000, max=9000)
    drawn = sorted(distribution.draw(rng) for _ in range(8000))
    assert 740 < drawn[4000] < 860
    assert 3600 < drawn[7200] < 4400
    assert drawn[-1] == distribution.most == 9000


def test_workload_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps(
            {
                "name": "mine",
                "kinds": [
                    {"weight": 1, "text_tokens": 10},
                    {
                        "weight": 3,
                        "images": {"choices": {"1": 0.5, "3": 0.5}},
                        "sizes": {"32x48": 1},
                        "output_tokens": {"uniform": [5, 6]},
                    },
                ],
            }
        )
    )
    workload = find_workload(str(path), RandomMm())
    counts = Counter(len(r.pictures) for r in itertools.islice(generate(workload, SEED), 4000))
    assert set(counts) == {0, 1, 3}
    assert 0.22 < counts[0] / 4000 < 0.28
    assert Workload.model_validate_json(workload.model_dump_json()) == workload, (
        "it can be run again"
    )


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ([], "kinds"),
        ([{"weight": 0}], "kinds.0.weight"),
        ([{"images": {"choices": {}}}], "weights of choices"),
        ([{"images": {"uniform": [4, 1]}}], "LOW <= HIGH"),
        ([{"images": {"p50": 4}}], "p50 and p90 belong together"),
        ([{"images": {"p50": 4, "p90": 2}}], "must not be below"),
        ([{"images": "many"}], "'many'"),
        ([{"images": {"fixed": 1, "uniform": [1, 2]}}], "exactly one"),
        ([{"sizes": {"640": 1}}], "WIDTHxHEIGHT"),
        ([{"sizes": {"640x99999": 1}}], "from 1 to"),
        ([{"pictures": 3}], "kinds.0.pictures"),
    ],
)
def test_workload_file_that_cannot_be_used(tmp_path: Path, kinds: list[Any], told: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "kinds": kinds}))
    with pytest.raises(BenchError, match=r"mine\.json cannot be used") as caught:
        find_workload(str(path), RandomMm())
    assert told in str(caught.value)


def test_workload_file_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("{")
    with pytest.raises(BenchError, match="Invalid JSON"):
        find_workload(str(path), RandomMm())
