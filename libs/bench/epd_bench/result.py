"""What is written of a benchmark: its schema, and writing all of it or nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from epd_bench.client import Outcome
from epd_bench.errors import BenchError
from epd_bench.goodput import Goodput
from epd_bench.meter import ClientLoad
from epd_bench.summary import Summary
from epd_bench.target import TargetUse

SCHEMA = "epd-bench-1"
RESULT = "result.json"
PAGE = "report.html"


class Machine(msgspec.Struct, kw_only=True):
    """Where the client ran."""

    system: str
    processor: str
    cores: int
    memory_bytes: int
    load_average: float


class Result(msgspec.Struct, kw_only=True):
    """One benchmark.

    Attributes:
        workload: As JSON, with which it can be run again.
        summary: Of a run at one pace; none for a search.
        goodput: Of a search.
        requests: One by one, of a run.
    """

    schema: str = SCHEMA
    date: str
    command: list[str]
    url: str
    model: str
    seed: int
    workload: dict[str, Any]
    pace: dict[str, Any]
    machine: Machine
    versions: dict[str, str]
    client: ClientLoad | None = None
    summary: Summary | None = None
    goodput: Goodput | None = None
    target: TargetUse | None = None
    requests: list[Outcome] = []


def result_schema() -> dict[str, Any]:
    """The JSON schema of ``result.json``."""
    return msgspec.json.schema(Result)


def this_machine() -> Machine:
    """The machine that this runs on."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        system=platform.platform(),
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_bytes=pages,
        load_average=os.getloadavg()[0],
    )


def versions() -> dict[str, str]:
    """Of what the client is made of."""
    names = ("epdflow", "aiohttp", "uvloop")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}


def now() -> str:
    """The date and time, with the zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def check_folder(folder: Path) -> None:
    """Look before the run whether its results can be written.

    Raises:
        BenchError: something is there already, or nothing can be written there.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BenchError(f"{folder} is there already; name another place with --out")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-"):
            pass
    except OSError as error:
        raise BenchError(f"nothing can be written in {folder.parent}: {error.strerror}") from error


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder that appears with all of them, or not at all."""
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        for name, data in files.items():
            (temporary / name).write_bytes(data)
        temporary.chmod(0o755)
        if folder.exists():
            folder.rmdir()  # it was empty
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
