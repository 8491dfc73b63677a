"""``epd key new``: an API key, and the entry that lets it in."""

from __future__ import annotations

import argparse

from epd_common.api_keys import NAME, ApiKey, hash_key, new_key, parse_list
from epd_common.errors import BadRequestError


def add_key_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="Make a key. It is shown once and kept nowhere.")
    new.add_argument("--tenant", type=_name, required=True, help="whose key it is")
    new.add_argument("--name", type=_name, default="", help="tells the tenant's keys apart")
    new.add_argument("--weight", type=float, default=1.0, help="the tenant's share")
    new.add_argument(
        "--priority",
        type=int,
        default=0,
        help="the most urgent priority it may ask for; lower is sooner; default: 0",
    )
    new.add_argument(
        "--cache-scope",
        choices=("tenant", "shared"),
        help="whose embeddings it may reuse; default: as the gateway's EPD_CACHE_SCOPE says",
    )


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to 64 letters, digits and . _ -")
    return text


async def run_key(arguments: argparse.Namespace) -> int:
    """Print a new key, and its line for the file of keys."""
    key = new_key()
    entry = ApiKey(
        hash=hash_key(key.encode()),
        tenant=arguments.tenant,
        name=arguments.name,
        weight=arguments.weight,
        cache_scope=arguments.cache_scope,
        priority=arguments.priority,
    )
    try:
        parse_list(entry.line())
    except ValueError as error:
        raise BadRequestError(str(error).partition(": ")[2]) from None
    print(f"The key, shown this once, for the client:\n{key}")
    print(f"Its line for the gateway's EPD_API_KEYS_FILE:\n{entry.line()}")
    return 0
