"""``epd plan``: what it advises, what it writes, and what it says of input that makes no sense."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from epd_bench.builtin import RandomMm, find_workload
from epd_bench.goodput import Probe
from epd_bench.slo import parse_slo
from epd_cli.plan import run_plan
from epd_cli.plan_arguments import add_plan_arguments
from epd_plan.needs import needs
from epd_plan.planning import PRECISION, Choice, Planner, Prices, decide
from epd_plan.probing import Prober
from epd_plan.shape import Shape
from epd_sim.profiles import profile_named
from k8s_chart import containers, environment, render

HEAVY = ("--images", "8", "--sizes", "1280x720", "--text", "100", "--output", "50")


async def epd_plan(*arguments: str) -> int:
    """Run it in this process; its exit code."""
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    try:
        return await run_plan(parser.parse_args(arguments))
    except SystemExit as end:
        return int(end.code or 0)


async def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The plan, as JSON."""
    assert await epd_plan("--json", *arguments) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def of(plan: dict[str, Any], system: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in plan["choices"] if one["system"] == system)
    return found


# -- what it advises -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["text", "image-light"])
async def test_no_encoders_of_their_own_where_there_is_little_to_encode(
    workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = await planned(capsys, "--gpus", "3", "--workload", workload)
    assert plan["decision"] == "colocated"
    split, colocated = of(plan, "split"), of(plan, "colocated")
    assert split["goodput"] < 0.95 * colocated["goodput"]
    assert split["encoders"] == 1, "no more than it has to have"


@pytest.mark.slow
@pytest.mark.parametrize("load", [HEAVY, ("--workload", "azure")], ids=["heavy", "azure"])
async def test_encoders_apart_where_there_is_much_to_encode(
    load: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = await planned(capsys, "--gpus", "8", *load)
    assert plan["decision"] == "split"
    split = of(plan, "split")
    assert split["encoders"] + split["pds"] == 8
    assert split["goodput"] > 1.05 * of(plan, "colocated")["goodput"]
    assert split["slo_share"] >= 0.99 and 0 < split["ttft_p50_s"] < split["ttft_p99_s"]
    assert split["per_1000"] == pytest.approx(8 / 3.6 / split["goodput"])


@pytest.mark.parametrize("wrong", [0.05, 20.0], ids=["too few", "too many"])
async def test_the_best_split_is_found_from_a_wrong_guess(wrong: float) -> None:
    profile, azure = profile_named("qwen2.5-vl-7b-h100"), find_workload("azure", RandomMm())
    base = Shape(profile=profile, encoders=1, pds=1)
    right = needs(azure, 1, profile, base.costs)

    class Simple(Prober):
        """Four of eight are best, and each one more or less is much worse."""

        def passes(self, shape: Shape, rate: float) -> Probe:
            return Probe(rate=rate, passed=rate <= 10.0 - 2 * abs(shape.encoders - 4))

    planner = Planner(
        prober=Simple(profile, azure, parse_slo("default"), 1, 1.0, lambda line: None),
        base=base,
        needs=dataclasses.replace(right, encode_s=right.encode_s * wrong),
        prices=Prices(),
        priced=False,
    )
    plan = await planner.for_gpus(8, None)
    found = next(one for one in plan.choices if one.system == "split")
    assert (found.encoders, found.pds) == (4, 4)
    assert found.goodput == pytest.approx(10.0, rel=PRECISION)


async def test_one_gpu_cannot_be_split(capsys: pytest.CaptureFixture[str]) -> None:
    plan = await planned(capsys, "--gpus", "1", "--workload", "azure")
    assert {choice["system"] for choice in plan["choices"]} == {"colocated", "ec_both"}
    assert "split cannot keep the SLO" in plan["why"]


@pytest.mark.slow
async def test_as_few_gpus_as_a_rate_needs(capsys: pytest.CaptureFixture[str]) -> None:
    rate = ("--workload", "azure", "--rate")
    some, more = [await planned(capsys, *rate, number) for number in ("5", "15")]
    for plan in (some, more):
        assert all(choice["slo_share"] >= 0.99 for choice in plan["choices"])
    few, many = of(some, "split"), of(more, "split")
    assert few["encoders"] + few["pds"] < many["encoders"] + many["pds"]


@pytest.mark.slow
async def test_prices_count(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--gpus", "4", *HEAVY)
    dear = await planned(capsys, *load, "--price", "encoder=30,pd=3")
    cheap = await planned(capsys, *load, "--price", "encoder=0.3,pd=3")
    assert (dear["decision"], cheap["decision"]) == ("colocated", "split")
    split = of(cheap, "split")
    price = 0.3 * split["encoders"] + 3 * split["pds"]
    assert split["per_1000"] == pytest.approx(price / 3.6 / split["goodput"])


def choice(system: str, cost: float) -> Choice:
    numbers = dict.fromkeys(Choice.__struct_fields__, 1.0)
    return Choice(**{**numbers, "system": system, "per_1000": cost})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("colocated", "ec_both", "split", "taken"),
    [
        (1.0, 1.0, 1.0, "colocated"),
        (1.0, 1.0, 1.0 / (1 + PRECISION / 2), "colocated"),  # no search can tell them apart
        (1.0, 1.0, 0.9, "split"),
        (1.2, 0.9, 0.88, "ec_both"),
        (0.5, 0.9, 0.88, "colocated"),
    ],
)
def test_the_cheapest_is_taken_and_of_equals_the_simplest(
    colocated: float, ec_both: float, split: float, taken: str
) -> None:
    found = [choice("colocated", colocated), choice("ec_both", ec_both), choice("split", split)]
    assert decide(found)[0] == taken


# -- what it shows and writes ----------------------------------------------------------------------


async def test_table_and_progress(capsys: pytest.CaptureFixture[str]) -> None:
    assert await epd_plan("--gpus", "2", "--workload", "azure", "--rate", "1") == 0
    shown = capsys.readouterr()
    for row in ("encoders", "PD workers", "goodput", "TTFT p99", "TPOT p50", "1,000 requests cost"):
        assert row in shown.out
    assert "the SLO at" in shown.err and "the SLO at" not in shown.out


@pytest.mark.slow
async def test_files_for_deployments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--workload", "azure", "--rate", "30", "--max-num-seqs", "32")
    plan = await planned(capsys, *load, "--write", "compose", "--out", str(tmp_path / "a.yml"))
    split = of(plan, "split")
    written = yaml.safe_load((tmp_path / "a.yml").read_text())["services"]
    assert written["encoder"] == {"scale": split["encoders"]}
    assert written["pd"]["scale"] == split["pds"]
    assert written["pd"]["environment"] == {
        "EPD_MAX_NUM_SEQS": "32",
        "EPD_PD_SLOTS": "64",
        "EPD_EC_ROLE": "ec_consumer",
    }
    await planned(capsys, *load, "--write", "helm", "--out", str(tmp_path / "b.yaml"))
    values = yaml.safe_load((tmp_path / "b.yaml").read_text())
    pools = values["pools"]
    assert pools["encoder"]["replicas"] == split["encoders"]
    assert pools["pd"]["replicas"] == split["pds"] and values["gateway"]["replicas"] >= 1
    environments = {
        environment(container)["EPD_PD_SLOTS"]
        for _, container in containers(render(values))
        if container["name"] == "pd"
    }
    assert environments == {"64"}
    assert sorted(os.listdir(tmp_path)) == ["a.yml", "b.yaml"]


async def test_colocated_is_deployed_as_workers_that_do_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = await planned(capsys, "--workload", "text", "--gpus", "1", "--write", "compose")
    assert plan["decision"] == "colocated"
    written = yaml.safe_load((tmp_path / "compose.plan.yml").read_text())["services"]
    assert written["encoder"]["scale"] == 0 and written["pd"]["scale"] == 1
    assert written["pd"]["environment"]["EPD_EC_ROLE"] == "ec_both"


async def test_a_file_of_somebody_else_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "docker-compose.yml"
    load = ("--workload", "text", "--rate", "1", "--write", "compose", "--out")
    for content in (b"services: {}\n", b"\xff\xfe"):
        other.write_bytes(content)
        assert await epd_plan(*load, str(other)) == 2
        assert "is no plan of" in capsys.readouterr().err and other.read_bytes() == content
    other.unlink()
    for _ in range(2):  # its own one is replaced
        assert await epd_plan(*load, str(other)) == 0
    assert await epd_plan(*load, str(tmp_path / "no" / "folder.yml")) == 2
    assert "cannot be written" in capsys.readouterr().err


# -- what makes no sense ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give --gpus, --rate, or both"),
        (("--gpus", "0"), "--gpus must be from 1 to 4096, got 0"),
        (("--gpus", "-3"), "--gpus must be from 1"),
        (("--gpus", "5000"), "--gpus must be from 1 to 4096"),
        (("--gpus", "many"), "invalid int value"),
        (("--gpus", "2", "--profile", "nix"), "there is no profile 'nix'; these are: qwen2.5-vl"),
        (("--gpus", "2", "--profile", "instant"), "takes no time at all"),
        (("--gpus", "2", "--workload", "nix"), "there is no workload 'nix'"),
        (("--gpus", "2", "--workload", "nix.json"), "cannot be read"),
        (("--gpus", "2", "--sizes", "10000x20"), "one may be 200 times the other at most"),
        (("--gpus", "2", "--slo", "fast"), "cannot be used"),
        (("--gpus", "2", "--link", "string"), "there is no link 'string'; these are: arena"),
        (("--rate", "0"), "--rate must be above 0, got 0"),
        (("--rate", "nan"), "--rate must be above 0"),
        (("--rate", "inf"), "--rate must be above 0"),
        (("--gpus", "2", "--encoder-slowdown", "-1"), "--encoder-slowdown must be above 0"),
        (("--gpus", "2", "--max-num-seqs", "0"), "--max-num-seqs must be above 0"),
        (("--gpus", "2", "--burstiness", "0"), "--burstiness must be above 0"),
        (("--gpus", "2", "--price", "3"), "is no number"),
        (("--gpus", "2", "--price", "encoder=1"), "must name both"),
        (("--gpus", "2", "--price", "encoder=1,pd=0"), "each above 0"),
        (("--gpus", "2", "--price", "gateway=1,pd=1"), "must be like encoder=1.2,pd=2.5"),
        (("--gpus", "2", "--slo", "ttft=0.001,tpot=1"), "no number of GPUs meets the SLO"),
        (("--rate", "3", "--slo", "ttft=9,tpot=0.0001"), "no number of GPUs meets the SLO"),
        (("--gpus", "2", "--rate", "500"), "2 GPUs do not keep the SLO"),
        (("--rate", "1e9"), "no system of up to 4096 GPUs keeps the SLO"),
        (("--gpus", "2", "--write", "terraform"), "invalid choice"),
    ],
)
async def test_bad_input(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await epd_plan(*arguments) == 2
    shown = capsys.readouterr()
    assert told in shown.err and not shown.out and "Traceback" not in shown.err
