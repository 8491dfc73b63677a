"""``epd doctor``: what it is told to look at."""

from __future__ import annotations

import argparse
import contextlib
import os

from epd_cli.commands.starting import small_model
from epd_common.errors import EpdError


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
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
            option,
            default="",
            metavar="URL",
            help=f"default: {variable}, or where no NATS is named what `epd up` started",
        )


async def run_doctor(arguments: argparse.Namespace) -> int:
    from epd_cli.doctor import Asked, doctor, purpose_of
    from epd_cli.stack import read_state
    from epd_common.settings import CommonSettings

    running = (arguments.state_dir / "state.json").exists()
    state = read_state(arguments.state_dir) if running else {}
    purpose = arguments.purpose or purpose_of(os.environ)
    model = arguments.model
    if not model and purpose == "up":
        with contextlib.suppress(EpdError):
            model = small_model()
    nats_url = arguments.nats or os.environ.get("EPD_NATS_URL", "")
    # A service that is told of its NATS alone takes the usual Valkey, not the one that `epd up` started.
    usual = (
        CommonSettings.model_fields["redis_url"].default if nats_url else state.get("redis_url", "")
    )
    asked = Asked(
        purpose=purpose,
        nats_url=nats_url or state.get("nats_url", ""),
        redis_url=arguments.redis or os.environ.get("EPD_REDIS_URL", usual),
        model=model,
        own_pids={process["pid"] for process in state.get("processes", ())},
    )
    return await doctor(asked, as_json=arguments.json)
