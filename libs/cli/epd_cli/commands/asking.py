"""``epd submit``, ``epd cancel`` and ``epd explain``: single requests."""

from __future__ import annotations

import argparse
from pathlib import Path

from epd_cli.commands.which_brokers import broker_arguments, brokers_of


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--text", required=True)
    parser.add_argument("--model", default="", help="default: the only one that is served")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    broker_arguments(parser)


async def run_submit(arguments: argparse.Namespace) -> int:
    from epd_cli.submit import submit

    nats_url, redis_url = brokers_of(arguments)
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


def add_cancel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", nargs="+", metavar="REQUEST_ID", help="see x-request-id")
    broker_arguments(parser)


async def run_cancel(arguments: argparse.Namespace) -> int:
    from epd_cli.cancel import cancel

    nats_url = arguments.nats or brokers_of(arguments)[0]
    return await cancel(nats_url, arguments.request_id)


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", help="see x-request-id")
    parser.add_argument("--json", action="store_true")
    broker_arguments(parser)


async def run_explain(arguments: argparse.Namespace) -> int:
    from epd_cli.explain import explain

    nats_url = arguments.nats or brokers_of(arguments)[0]
    return await explain(nats_url, arguments.request_id, as_json=arguments.json)
