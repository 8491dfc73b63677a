"""``epd up`` and ``epd demo``: what they start."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from epd_cli.argument_types import port
from epd_common.errors import EpdError

if TYPE_CHECKING:
    from epd_cli.stack import StackOptions

SMALL_MODEL = Path("models/shapes-qwen2vl")
SIM_MODEL = "sim"


def add_up_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=("vllm", "sim"),
        default=os.environ.get("EPD_ENGINE", "vllm"),
        help="sim: no model and no vLLM; answers are digests, in the time of EPD_SIM_PROFILE",
    )
    _stack_arguments(parser)
    parser.add_argument(
        "--port",
        type=port,
        default=os.environ.get("EPD_PORT", "8000"),
        help="of the gateway; 0 takes a free one",
    )


async def run_up(arguments: argparse.Namespace) -> int:
    from epd_cli.up import up

    return await up(_options(arguments, port=arguments.port))


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("vllm",), default="vllm")
    _stack_arguments(parser)


async def run_demo(arguments: argparse.Namespace) -> int:
    from epd_cli.demo import demo

    return await demo(_options(arguments, port=0))


def _stack_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=os.environ.get("EPD_MODEL", ""),
        help="path or hub id; empty: the small model of the repository, or `sim`",
    )
    parser.add_argument(
        "--served-model",
        default=os.environ.get("EPD_SERVED_MODEL", ""),
        help="name that clients use; empty: the last part of the model's path",
    )
    parser.add_argument(
        "--encoders",
        type=_count_or_none,
        default=1,
        metavar="N",
        help="encoder processes; with 0, PD processes encode as well",
    )
    parser.add_argument(
        "--pds",
        type=_count,
        metavar="N",
        help="processes that prefill and decode; 1, or none with --prefills",
    )
    parser.add_argument(
        "--prefills", type=_count, default=0, metavar="N", help="processes that prefill alone"
    )
    parser.add_argument(
        "--decodes", type=_count, default=0, metavar="N", help="processes that decode for those"
    )
    parser.add_argument(
        "--store",
        choices=("arena", "nixl", "redis"),
        default="arena",
        help="how embeddings come to PD processes: all share one arena, or each process is a node of its own "
        "and reads them out of the encoder's memory (nixl) or from Valkey (redis)",
    )
    parser.add_argument("--nats", default="", metavar="URL", help="a NATS that runs already")
    parser.add_argument("--redis", default="", metavar="URL", help="a Valkey that runs already")


def _count(text: str, least: int = 1) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"must be {least} or more")
    return number


def _count_or_none(text: str) -> int:
    return _count(text, least=0)


def _options(arguments: argparse.Namespace, *, port: int) -> StackOptions:
    from epd_cli.stack import StackOptions

    if bool(arguments.prefills) != bool(arguments.decodes):
        raise EpdError("--prefills and --decodes go together: what one hands over the other takes")
    if arguments.engine == "sim":
        model = arguments.model or SIM_MODEL
    else:
        model = arguments.model or small_model()
        _check_folder(model)
    return StackOptions(
        engine=arguments.engine,
        model=model,
        served_model=arguments.served_model or Path(model).name,
        encoders=arguments.encoders,
        pds=arguments.pds or (0 if arguments.prefills else 1),
        prefills=arguments.prefills,
        decodes=arguments.decodes,
        store=arguments.store,
        port=port,
        nats_url=arguments.nats,
        redis_url=arguments.redis,
        state_dir=arguments.state_dir,
    )


def _check_folder(model: str) -> None:
    """A local model must be one; what is none is looked for on the hub, later."""
    local = Path(model).is_absolute() or Path(model).exists()
    if local and not (Path(model) / "config.json").exists():
        raise EpdError(f"the model {model!r} is no folder with a config.json; check --model")


def small_model() -> str:
    """The model that comes with the repository."""
    for root in (Path.cwd(), *Path(__file__).resolve().parents):
        if (root / SMALL_MODEL / "config.json").exists():
            return str(root / SMALL_MODEL)
    raise EpdError(f"{SMALL_MODEL} is not here; name a model with --model")
