"""Fetching vLLM's source distribution, from an index that is a folder."""

from __future__ import annotations

import gc
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import vllm_source
from bench.vllm_source import SourceError

# pip leaves the pages of a folder's index to the garbage collector, open.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

PROXY = b"print('a proxy')\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page of vLLM in an index that pip asks, and no other one."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    page = tmp_path / "simple" / "vllm"
    page.mkdir(parents=True)
    yield page
    gc.collect()


def offer(page: Path, versions: tuple[str, ...], *, digest: str | None = None) -> None:
    """Put source distributions and a wheel each into an index; with their own digests, or another one."""
    lines = ["<!DOCTYPE html><html><body>"]
    for version in versions:
        archive = page / f"vllm-{version}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            for name, data in ((vllm_source.PROXY, PROXY), ("PKG-INFO", b"Name: vllm\n")):
                entry = tarfile.TarInfo(f"vllm-{version}/{name}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        right = hashlib.sha256(archive.read_bytes()).hexdigest()
        wheel = f"vllm-{version}-py3-none-any.whl"
        (page / wheel).write_bytes(b"")
        lines += [
            f'<a href="{archive.name}#sha256={right if digest is None else digest}">x</a>',
            f'<a href="{wheel}">x</a>',
        ]
    (page / "index.html").write_text("\n".join((*lines, "</body></html>")))


def cached(tmp_path: Path) -> list[str]:
    folder = tmp_path / "cache" / "epdflow"
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_versions_are_those_with_a_source_distribution(index: Path) -> None:
    offer(index, ("0.9.2", "0.33.0", "0.32.0"))
    (index / "vllm-0.33.0.tar.gz").unlink()
    assert vllm_source.versions() == ["0.33.0", "0.32.0", "0.9.2"], "the page says what there is"


def test_a_file_is_taken_out_of_the_version_that_was_asked_for(index: Path, tmp_path: Path) -> None:
    offer(index, ("0.32.0", "0.33.0"))
    lines: list[str] = []
    target = vllm_source.extract("0.32.0", vllm_source.PROXY, tmp_path, report=lines.append)
    assert target == tmp_path / "disagg_epd_proxy.py"
    assert target.read_bytes() == PROXY
    assert cached(tmp_path) == ["vllm-0.32.0.tar.gz"]
    assert lines[-1].startswith("fetched vllm-0.32.0.tar.gz") and "sha256 is right" in lines[-1]


def test_a_second_time_no_index_is_asked(index: Path) -> None:
    offer(index, ("0.32.0",))
    first = vllm_source.fetch("0.32.0")
    for path in index.iterdir():
        path.unlink()
    assert vllm_source.fetch("0.32.0") == first
    assert vllm_source.read(first, "PKG-INFO") == b"Name: vllm\n"


def test_another_hash_than_the_indexs_is_refused(index: Path, tmp_path: Path) -> None:
    offer(index, ("0.32.0",), digest="0" * 64)
    with pytest.raises(SourceError, match="its index says 0000"):
        vllm_source.fetch("0.32.0")
    assert cached(tmp_path) == []


def test_a_version_that_is_not_there(index: Path) -> None:
    offer(index, ("0.31.0", "0.33.0"))
    with pytest.raises(
        SourceError, match=r"of vllm 0\.32\.0 \(the newest are 0\.33\.0, 0\.31\.0\)"
    ):
        vllm_source.fetch("0.32.0")


def test_an_index_without_vllm(index: Path) -> None:
    (index / "index.html").write_text("")
    with pytest.raises(SourceError, match="nor of any other version"):
        vllm_source.fetch("0.32.0")


def test_a_file_that_is_not_in_it(index: Path) -> None:
    offer(index, ("0.32.0",))
    archive = vllm_source.fetch("0.32.0")
    with pytest.raises(SourceError, match="holds no file examples/other"):
        vllm_source.read(archive, "examples/other")
    archive.write_bytes(archive.read_bytes()[:60])
    with pytest.raises(SourceError, match="delete it"):
        vllm_source.read(archive, "PKG-INFO")
