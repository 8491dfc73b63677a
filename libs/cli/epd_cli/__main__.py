"""``epd``: the command line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from epd_cli.argument_types import interval, letter_number, new_deadline
from epd_cli.bench_arguments import add_bench_arguments
from epd_cli.key import add_key_arguments, run_key
from epd_cli.plan_arguments import add_plan_arguments
from epd_common.errors import EpdError
from epd_common.settings import SettingsError
from epd_common.telemetry.logs import configure_logging

if TYPE_CHECKING:
    from epd_cli.stack import StackOptions

SMALL_MODEL = Path("models/shapes-qwen2vl")
SIM_MODEL = "sim"
LINES = "\n\t"
"""What errors that quote the end of a log are made of."""


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    configure_logging("warning", "text")
    try:
        # The loop of the services, as the client of `epd bench` must be light.
        run = uvloop.run if arguments.command == "bench" else asyncio.run
        sys.exit(run(arguments.run(arguments)))
    except (EpdError, SettingsError) as error:
        from epd_cli.visible import visible

        print(f"epd {arguments.command}: {visible(str(error), keep=LINES)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="epd",
        description="Serve multimodal models with the encoder apart from prefill and decode.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add_arguments, run, summary in (
        ("up", _up_arguments, _up, "Start everything on this machine, with brokers of its own."),
        ("demo", _demo_arguments, _demo, "Start everything, ask what is known, give a verdict."),
        ("submit", _submit_arguments, _submit, "Send one request over NATS, without the gateway."),
        (
            "status",
            _status_arguments,
            _status,
            "Show the workers; exit code 1 if no model is ready.",
        ),
        (
            "explain",
            _explain_arguments,
            _explain,
            "Show what became of a request; exit code 1 if no gateway remembers it.",
        ),
        ("cancel", _cancel_arguments, _cancel, "End requests; exit code 1 if nobody had one."),
        (
            "audit",
            _audit_arguments,
            _audit,
            "Compare what came in with what became of it; exit code 1 where it does not add up.",
        ),
        (
            "dlq",
            _dlq_arguments,
            _dlq,
            "Look at the jobs that were given up, and what to do with them.",
        ),
        (
            "bench",
            add_bench_arguments,
            _bench,
            "Measure a server; exit code 2 where nothing could be.",
        ),
        (
            "plan",
            add_plan_arguments,
            _plan,
            "Tell what a load needs, by a model; exit code 2 where nothing can be.",
        ),
        ("key", add_key_arguments, run_key, "Make API keys for the gateway."),
        (
            "doctor",
            _doctor_arguments,
            _doctor,
            "Check this machine and the brokers, and say what to do; exit code 1 where something is wrong.",
        ),
        ("top", _top_arguments, _top, "Watch workers, queues and requests live."),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.set_defaults(run=run)
        command.add_argument(
            "--state-dir", type=Path, default=Path(".epd"), help="where `epd up` keeps its files"
        )
        add_arguments(command)
    return parser


def _up_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=("vllm", "sim"),
        default=os.environ.get("EPD_ENGINE", "vllm"),
        help="sim: no model and no vLLM; answers are digests, in the time of EPD_SIM_PROFILE",
    )
    _stack_arguments(parser)
    parser.add_argument(
        "--port",
        type=int,
        default=os.environ.get("EPD_PORT", "8000"),
        help="of the gateway; 0 takes a free one",
    )


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("vllm",), default="vllm")
    _stack_arguments(parser)


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
    parser.add_argument("--pds", type=_count, default=1, metavar="N", help="PD processes")
    parser.add_argument(
        "--store",
        choices=("arena", "nixl", "redis"),
        default="arena",
        help="how embeddings come to PD processes: all share one arena, or each process is a node of its own "
        "and reads them out of the encoder's memory (nixl) or from Valkey (redis)",
    )
    parser.add_argument("--nats", default="", metavar="URL", help="a NATS that runs already")
    parser.add_argument("--redis", default="", metavar="URL", help="a Valkey that runs already")


async def _up(arguments: argparse.Namespace) -> int:
    from epd_cli.up import up

    return await up(_options(arguments, port=arguments.port))


def _count(text: str, least: int = 1) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"must be {least} or more")
    return number


def _count_or_none(text: str) -> int:
    return _count(text, least=0)


def _options(arguments: argparse.Namespace, *, port: int) -> StackOptions:
    from epd_cli.stack import StackOptions

    if arguments.engine == "sim":
        model = arguments.model or SIM_MODEL
    else:
        model = arguments.model or _small_model()
        _check_folder(model)
    return StackOptions(
        engine=arguments.engine,
        model=model,
        served_model=arguments.served_model or Path(model).name,
        encoders=arguments.encoders,
        pds=arguments.pds,
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


def _small_model() -> str:
    """The model that comes with the repository."""
    for root in (Path.cwd(), *Path(__file__).resolve().parents):
        if (root / SMALL_MODEL / "config.json").exists():
            return str(root / SMALL_MODEL)
    raise EpdError(f"{SMALL_MODEL} is not here; name a model with --model")


async def _demo(arguments: argparse.Namespace) -> int:
    from epd_cli.demo import demo

    return await demo(_options(arguments, port=0))


def _submit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--text", required=True)
    parser.add_argument("--model", default="", help="default: the only one that is served")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    _broker_arguments(parser)


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
        temperature=arguments.temperature,
        timeout_s=arguments.timeout,
    )


def _cancel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", nargs="+", metavar="REQUEST_ID", help="see x-request-id")
    _broker_arguments(parser)


async def _cancel(arguments: argparse.Namespace) -> int:
    from epd_cli.cancel import cancel

    nats_url = arguments.nats or _brokers(arguments)[0]
    return await cancel(nats_url, arguments.request_id)


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")
    _broker_arguments(parser)


async def _status(arguments: argparse.Namespace) -> int:
    from epd_cli.status import status

    nats_url = arguments.nats or _brokers(arguments)[0]
    return await status(nats_url, as_json=arguments.json)


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", help="see x-request-id")
    parser.add_argument("--json", action="store_true")
    _broker_arguments(parser)


async def _explain(arguments: argparse.Namespace) -> int:
    from epd_cli.explain import explain

    nats_url = arguments.nats or _brokers(arguments)[0]
    return await explain(nats_url, arguments.request_id, as_json=arguments.json)


def _audit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--idle", action="store_true", help="nothing is asked now, so nothing may run or wait"
    )
    parser.add_argument(
        "--within", type=float, default=5.0, metavar="SECONDS", help="to look again for"
    )
    _broker_arguments(parser)


async def _audit(arguments: argparse.Namespace) -> int:
    from epd_cli.audit import audit

    nats_url, redis_url = _brokers(arguments)
    return await audit(
        nats_url,
        redis_url,
        as_json=arguments.json,
        idle=arguments.idle,
        within_s=arguments.within,
    )


def _dlq_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="all of them, the oldest first")
    listing.add_argument("--json", action="store_true")
    show = actions.add_parser("show", help="one, with its job")
    show.add_argument("number", type=letter_number, nargs=1)
    requeue = actions.add_parser("requeue", help="have jobs done again")
    requeue.add_argument(
        "--timeout",
        type=new_deadline,
        default=120.0,
        metavar="SECONDS",
        help="what they get anew, 3600 at most",
    )
    drop = actions.add_parser("drop", help="forget them")
    for action in (requeue, drop):
        which = action.add_mutually_exclusive_group(required=True)
        which.add_argument("number", type=letter_number, nargs="*", default=[])
        which.add_argument("--all", action="store_true")
    for action in (listing, show, requeue, drop):
        _broker_arguments(action)


async def _dlq(arguments: argparse.Namespace) -> int:
    from epd_cli import dlq

    nats_url = arguments.nats or _brokers(arguments)[0]
    match arguments.action:
        case "list":
            return await dlq.list_letters(nats_url, as_json=arguments.json)
        case "show":
            return await dlq.show_letter(nats_url, arguments.number[0])
        case "requeue":
            numbers = arguments.number
            return await dlq.requeue_letters(nats_url, numbers, timeout_s=arguments.timeout)
        case _:
            return await dlq.drop_letters(nats_url, arguments.number)


async def _bench(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("aiohttp") is None:
        raise EpdError("it needs the extra `bench`: install `epdflow[bench]`")
    from epd_cli.bench import run_bench

    return await run_bench(arguments)


async def _plan(arguments: argparse.Namespace) -> int:
    from epd_cli.plan import run_plan

    return await run_plan(arguments)


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=("up", "gateway", "worker"),
        default=None,
        help="what this machine is for; default: by EPD_NATS_URL and EPD_MODEL",
    )
    parser.add_argument(
        "--model",
        default=os.environ.get("EPD_MODEL", ""),
        help="path or hub id; empty: the small model of the repository",
    )
    for option in ("--nats", "--redis"):
        variable = f"EPD_{option[2:].upper()}_URL"
        parser.add_argument(
            option, default="", metavar="URL", help=f"default: {variable}, or what `epd up` started"
        )


async def _doctor(arguments: argparse.Namespace) -> int:
    from epd_cli.doctor import Asked, doctor, purpose_of
    from epd_cli.stack import read_state

    running = (arguments.state_dir / "state.json").exists()
    state = read_state(arguments.state_dir) if running else {}
    purpose = arguments.purpose or purpose_of(os.environ)
    model = arguments.model
    if not model and purpose == "up":
        with contextlib.suppress(EpdError):
            model = _small_model()
    asked = Asked(
        purpose=purpose,
        nats_url=arguments.nats or os.environ.get("EPD_NATS_URL", state.get("nats_url", "")),
        redis_url=arguments.redis or os.environ.get("EPD_REDIS_URL", state.get("redis_url", "")),
        model=model,
        own_pids={process["pid"] for process in state.get("processes", ())},
    )
    return await doctor(asked, as_json=arguments.json)


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument(
        "--interval", type=interval, default=1.0, metavar="SECONDS", help="between two looks"
    )
    parser.add_argument(
        "--gateway",
        default="",
        metavar="URL",
        help="whose recent requests are shown, asked with the key in EPD_API_KEY; default: that of "
        "`epd up`, or one that the registry names",
    )
    _broker_arguments(parser)


async def _top(arguments: argparse.Namespace) -> int:
    from epd_cli.stack import read_state
    from epd_cli.top import top

    nats_url, gateway_url = arguments.nats, arguments.gateway
    if not nats_url:
        state = read_state(arguments.state_dir)
        nats_url = state["nats_url"]
        gateway_url = gateway_url or state["gateway_url"]
    return await top(
        nats_url, gateway_url=gateway_url, once=arguments.once, interval_s=arguments.interval
    )


if __name__ == "__main__":
    main()
