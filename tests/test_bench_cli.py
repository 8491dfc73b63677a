"""``epd bench`` as a program: what it writes, and that it writes nothing where it was given nonsense."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epd_bench.plots import check_plots
from epd_bench.result import PAGE, RESULT, Result, result_schema, write_folder
from epd_cli.bench import run_bench
from epd_cli.bench_arguments import add_bench_arguments
from epd_cli.stack import StackOptions, run_stack
from scripted_server import Script, scripted_server, tokens

ANSWER = tokens(3, first_s=0.0, each_s=0.005)
LIGHT = ("--sizes", "8x8", "--text", "5", "--output", "3", "--seed", "1", "--requests", "6")


async def epd_bench(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run it in a folder; exit code and output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "epd_cli",
        "bench",
        *arguments,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.mark.slow
async def test_results_are_written_and_can_be_read_back(tmp_path: Path) -> None:
    async with scripted_server(lambda body: ANSWER) as server:
        code, output = await epd_bench(
            tmp_path, "--url", server.url + "/v1", *LIGHT, "--out", "here/r"
        )
    assert code == 0, output
    assert "6 of 6 answered" in output and "seed 1" in output
    files = {path.name for path in (tmp_path / "here" / "r").iterdir()}
    assert files == {RESULT, PAGE, "times.png", "course.png"}
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["r"], (
        "nothing half done is left"
    )
    result = msgspec.json.decode((tmp_path / "here/r" / RESULT).read_bytes(), type=Result)
    assert result.summary is not None and result.summary.answered == len(result.requests) == 6
    assert (result.seed, result.model, result.target) == (1, "m", None)
    assert "--out" in result.command and result.machine.cores and result.versions["epdflow"]
    page = (tmp_path / "here/r" / PAGE).read_text()
    assert page.count("data:image/png;base64,") == 2 and "http-equiv" not in page
    assert 'src="http' not in page and "href=" not in page, "it needs nothing beside it"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def epd_bench_here(*arguments: str) -> int:
    """The same in this process, which takes less time; its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state-dir", type=Path, default=Path(".epd"))
    add_bench_arguments(parser)
    try:
        return await run_bench(parser.parse_args(arguments))
    except SystemExit as end:
        return int(end.code or 0)


def files_below(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


@pytest.mark.slow
async def test_goodput_from_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with scripted_server(
        lambda body: tokens(2, first_s=0.3 if server.open_now > 5 else 0.05, each_s=0.0)
    ) as server:
        code = await epd_bench_here(
            *("--url", server.url, *LIGHT[:-2], "--no-plots", "--goodput", "--from", "40"),
            *("--probe-s", "0.3", "--precision", "3", "--slo", "ttft=0.2,tpot=1,share=0.8"),
            *("--out", "r"),
        )
    assert code == 0
    assert "goodput" in capsys.readouterr().out
    result = msgspec.json.decode((folder / "r" / RESULT).read_bytes(), type=Result)
    assert result.goodput is not None and result.goodput.probes and result.summary is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--rate", "0"), "--rate must be above 0"),
        (("--rate", "fast"), "invalid float value"),
        (("--rate", "1", "--concurrency", "2"), "exclude each other"),
        (("--goodput", "--requests", "5"), "--probe-s"),
        (("--burstiness", "-1"), "--burstiness must be above 0"),
        (("--duration", "nan"), "--duration must be above 0"),
        (("--concurrency", "0"), "--concurrency must be above 0"),
        (("--workload", "nix"), "there is no workload 'nix'"),
        (("--workload", "nix.json"), "cannot be read"),
        (("--slo", "ttft=1"), "tpot missing"),
        (("--sizes", "big"), "WIDTHxHEIGHT"),
        (("--sizes", "8x8:heavy"), "is no number"),
        (("--spread", "1"), "--spread must be"),
        (("--model", "other"), "no model 'other'; it has: m"),
        (("--out", "taken"), "is there already"),
        (("--warmup", "-1"), "--warmup must be 0 or more"),
        (("--goodput", "--slo", "ttft=0.000001,tpot=1"), "no rate meets the SLO"),
        (("--url", "here"), "no address"),
        (("--url", "http://127.0.0.1:1"), "does not answer"),
    ],
)
async def test_nonsense_is_refused_and_nothing_written(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    (folder / "taken").mkdir()
    (folder / "taken" / "file").touch()
    async with scripted_server(lambda body: ANSWER) as server:
        code = await epd_bench_here("--url", server.url, "--no-plots", *arguments)
    shown = capsys.readouterr().err
    assert code == 2, shown
    assert told in shown
    assert files_below(folder) == ["taken/file"]


async def test_nonsense_ends_the_program_with_2(tmp_path: Path) -> None:
    code, output = await epd_bench(tmp_path, "--url", "http://127.0.0.1:1")
    assert code == 2 and "does not answer" in output and "Traceback" not in output


async def test_server_that_refuses_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = Script([b'{"error": {"message": "no such field", "code": "bad"}}'], 400)
    async with scripted_server(lambda body: refusal) as server:
        code = await epd_bench_here("--url", server.url, "--no-plots", *LIGHT)
    shown = capsys.readouterr().err
    assert code == 2 and "the first request failed (400 bad)" in shown and "no such field" in shown
    assert files_below(folder) == []


async def test_without_a_server_or_a_stack(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = await epd_bench_here()
    shown = capsys.readouterr().err
    assert code == 2 and "--url is not given" in shown and "epd up" in shown


@pytest.mark.slow
async def test_our_own_stack_is_looked_into(tmp_path: Path) -> None:
    options = StackOptions(
        engine="sim",
        model="sim",
        served_model="sim",
        port=0,
        state_dir=tmp_path / ".epd",
        environment={"EPD_SIM_PROFILE": "instant"},
    )
    async with run_stack(options, lambda view: None):
        code, output = await epd_bench(
            tmp_path, "--workload", "one-picture", "--requests", "9", "--out", "r", "--no-plots"
        )
    assert code == 0, output
    target = msgspec.json.decode((tmp_path / "r" / RESULT).read_bytes(), type=Result).target
    assert target is not None
    assert set(target.cpu_s) == {"gateway", "encoder", "pd"} and target.cpu_s["gateway"] > 0
    assert target.encodes_per_distinct_image == 1.0, "nine users, one picture, one encode"
    assert target.counts["encoded"] == 1 and target.counts["embedding_bytes"] > 0


def test_write_folder_writes_all_or_nothing(tmp_path: Path) -> None:
    bad: dict[str, Any] = {"a": b"1", "b": None}
    with pytest.raises(TypeError):
        write_folder(tmp_path / "r", bad)
    assert not list(tmp_path.iterdir())
    write_folder(tmp_path / "r", {"a": b"1"})
    assert (tmp_path / "r" / "a").read_bytes() == b"1"


def test_schema_is_one() -> None:
    schema = result_schema()
    assert json.loads(json.dumps(schema))["$defs"]["Result"]["properties"]["summary"]


def test_missing_matplotlib_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Exception, match=r"epdflow\[bench\]"):
        check_plots()
