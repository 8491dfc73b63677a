"""``epd``: the command line."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import uvloop

from epd_cli.commands.table import COMMANDS
from epd_common.errors import EpdError
from epd_common.settings import SettingsError
from epd_common.telemetry.logs import configure_logging

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
    for name, add_arguments, run, summary in COMMANDS:
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


if __name__ == "__main__":
    main()
