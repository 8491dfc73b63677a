"""Which vLLM this works with, and what its CPU build needs to run."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import signal
import sys
from pathlib import Path

from epd_common.errors import EpdError
from epd_vllm.cpu_build import mend_cpu_build

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
