"""``epd status``, ``epd top`` and ``epd audit``: the system as a whole."""

from __future__ import annotations

import argparse

from epd_cli.argument_types import interval
from epd_cli.commands.which_brokers import broker_arguments, brokers_of


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")
    broker_arguments(parser)


async def run_status(arguments: argparse.Namespace) -> int:
    from epd_cli.status import status

    nats_url = arguments.nats or brokers_of(arguments)[0]
    return await status(nats_url, as_json=arguments.json)


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
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
    broker_arguments(parser)


async def run_top(arguments: argparse.Namespace) -> int:
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


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--idle", action="store_true", help="nothing is asked now, so nothing may run or wait"
    )
    parser.add_argument(
        "--within", type=float, default=5.0, metavar="SECONDS", help="to look again for"
    )
    broker_arguments(parser)


async def run_audit(arguments: argparse.Namespace) -> int:
    from epd_cli.audit import audit

    nats_url, redis_url = brokers_of(arguments)
    return await audit(
        nats_url,
        redis_url,
        as_json=arguments.json,
        idle=arguments.idle,
        within_s=arguments.within,
    )
