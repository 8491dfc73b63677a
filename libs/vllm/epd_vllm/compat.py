"""Which vLLM this works with, and what its CPU build needs to run.

``install`` is also registered as a vLLM plug-in, so it runs in each of vLLM's processes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from typing import Any

from epd_common.errors import EpdError

SUPPORTED = ((0, 32), (0, 33))
"""First and last minor version of vLLM whose hooks this package was checked against."""

CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # else the first request waits 20 s for the compiler
}
COMMON_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

_kept: list[Any] = []  # torch forgets operator schemas once their library object is collected


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
    """Set what vLLM reads from the environment, before it is imported; what the user set stays."""
    _, is_cpu = vllm_version()
    for name, value in (COMMON_ENVIRONMENT | (CPU_ENVIRONMENT if is_cpu else {})).items():
        os.environ.setdefault(name, value)


def install() -> None:
    """Make ``import torchvision`` succeed beside a CPU build of torch.

    The package index's torchvision is a CUDA build. Its compiled operators cannot load there, and then
    its import fails for want of two schemas that nothing here calls; vLLM's Qwen2-VL needs the import.
    """
    import torch

    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
        importlib.import_module("torchvision")
