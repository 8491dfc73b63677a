"""Which NATS and Valkey a command asks."""

from __future__ import annotations

import argparse


def broker_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nats", default="", metavar="URL", help="default: what `epd up` started")
    parser.add_argument("--redis", default="", metavar="URL")


def brokers_of(arguments: argparse.Namespace) -> tuple[str, str]:
    from epd_cli.stack import read_state

    if arguments.nats and arguments.redis:
        return arguments.nats, arguments.redis
    state = read_state(arguments.state_dir)
    return arguments.nats or state["nats_url"], arguments.redis or state["redis_url"]
