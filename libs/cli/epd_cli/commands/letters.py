"""``epd dlq``."""

from __future__ import annotations

import argparse

from epd_cli.argument_types import letter_number, new_deadline
from epd_cli.commands.which_brokers import broker_arguments, brokers_of


def add_dlq_arguments(parser: argparse.ArgumentParser) -> None:
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
        broker_arguments(action)


async def run_dlq(arguments: argparse.Namespace) -> int:
    from epd_cli import dlq

    nats_url = arguments.nats or brokers_of(arguments)[0]
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
