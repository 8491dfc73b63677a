"""``epd``: the command line."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from epd_common.errors import EpdError
from epd_common.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from epd_cli.stack import StackOptions

SMALL_MODEL = Path("models/shapes-qwen2vl")


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    configure_logging("warning", "text")
    try:
        sys.exit(asyncio.run(arguments.run(arguments)))
    except EpdError as error:
        print(f"epd {arguments.command}: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="epd",
        description="Serve multimodal models with the encoder apart from prefill and decode.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, describe, run in (
        ("up", _describe_up, _up),
        ("demo", _describe_demo, _demo),
        ("submit", _describe_submit, _submit),
        ("status", _describe_status, _status),
        ("doctor", _describe_doctor, _doctor),
    ):
        _add(commands, name, describe, run)
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    describe: Callable[[argparse.ArgumentParser], str],
    run: Callable[[argparse.Namespace], Awaitable[int]],
) -> None:
    parser = commands.add_parser(name)
    parser.description = describe(parser)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--state-dir", type=Path, default=Path(".epd"), help="where `epd up` keeps its files"
    )


def _describe_up(parser: argparse.ArgumentParser) -> str:
    _stack_arguments(parser)
    parser.add_argument("--port", type=int, default=8000, help="of the gateway; 0 takes a free one")
    return "Start everything on this machine, with brokers of its own."


def _stack_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("vllm",), default="vllm")
    parser.add_argument("--model", default="", help="path or hub id; default: the small model")
    parser.add_argument("--served-model", default="", help="name that clients use")
    parser.add_argument("--encoders", type=int, default=1, metavar="N")
    parser.add_argument("--pds", type=int, default=1, metavar="N")
    parser.add_argument("--nats", default="", metavar="URL", help="a NATS that runs already")
    parser.add_argument("--redis", default="", metavar="URL", help="a Valkey that runs already")


async def _up(arguments: argparse.Namespace) -> int:
    from epd_cli.up import up

    return await up(_options(arguments, port=arguments.port))


def _options(arguments: argparse.Namespace, *, port: int) -> StackOptions:
    from epd_cli.stack import StackOptions

    model = arguments.model or _small_model()
    return StackOptions(
        model=model,
        served_model=arguments.served_model or Path(model).name,
        encoders=arguments.encoders,
        pds=arguments.pds,
        port=port,
        nats_url=arguments.nats,
        redis_url=arguments.redis,
        state_dir=arguments.state_dir,
    )


def _small_model() -> str:
    """The model that comes with the repository."""
    for root in (Path.cwd(), *Path(__file__).resolve().parents):
        if (root / SMALL_MODEL / "config.json").exists():
            return str(root / SMALL_MODEL)
    raise EpdError(f"{SMALL_MODEL} is not here; name a model with --model")


def _describe_demo(parser: argparse.ArgumentParser) -> str:
    _stack_arguments(parser)
    return "Start everything, ask questions whose answers are known, and give a verdict."


async def _demo(arguments: argparse.Namespace) -> int:
    from epd_cli.demo import demo

    return await demo(_options(arguments, port=0))


def _describe_submit(parser: argparse.ArgumentParser) -> str:
    parser.add_argument("--image", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--text", required=True)
    parser.add_argument("--model", default="", help="default: the only one that is served")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    _broker_arguments(parser)
    return "Send one request straight over NATS; works with the gateway stopped."


def _broker_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nats", default="", metavar="URL", help="default: what `epd up` started")
    parser.add_argument("--redis", default="", metavar="URL")


def _brokers(arguments: argparse.Namespace) -> tuple[str, str]:
    from epd_cli.stack import read_state

    if arguments.nats and arguments.redis:
        return arguments.nats, arguments.redis
    state = read_state(arguments.state_dir)
    return arguments.nats or state["nats_url"], arguments.redis or state["redis_url"]


async def _submit(arguments: argparse.Namespace) -> int:
    from epd_cli.submit import submit

    nats_url, redis_url = _brokers(arguments)
    return await submit(
        nats_url=nats_url,
        redis_url=redis_url,
        images=arguments.image,
        text=arguments.text,
        model=arguments.model,
        max_tokens=arguments.max_tokens,
        timeout_s=arguments.timeout,
    )


def _describe_status(parser: argparse.ArgumentParser) -> str:
    parser.add_argument("--json", action="store_true")
    _broker_arguments(parser)
    return "Show the workers; exit code 1 if no model is ready."


async def _status(arguments: argparse.Namespace) -> int:
    from epd_cli.status import status

    nats_url = arguments.nats or _brokers(arguments)[0]
    return await status(nats_url, as_json=arguments.json)


def _describe_doctor(parser: argparse.ArgumentParser) -> str:
    _broker_arguments(parser)
    return "Check what this machine has, and whether the brokers answer."


async def _doctor(arguments: argparse.Namespace) -> int:
    from epd_cli.doctor import doctor

    running = (arguments.state_dir / "state.json").exists()
    nats_url, redis_url = _brokers(arguments) if running or arguments.nats else ("", "")
    return await doctor(nats_url, redis_url)


if __name__ == "__main__":
    main()
