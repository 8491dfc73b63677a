"""``epd status``: who is there and how they do."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from epd_cli.connect import operator_bus
from epd_cli.visible import cell
from epd_common.bus import Registry


async def status(nats_url: str, *, as_json: bool) -> int:
    """Print the registry; exit code 1 if no model can be served."""
    async with operator_bus(nats_url, name="epd status") as bus, Registry(bus) as registry:
        views = registry.workers()
        models = registry.models()
    rows: list[dict[str, Any]] = [
        {**msgspec.to_builtins(view.record), "alive": view.alive} for view in views
    ]
    for row in rows:
        row.pop("special_tokens")
    if as_json:
        print(json.dumps({"models": models, "workers": rows}, indent=1))
    else:
        _print(rows, models)
    return 0 if models else 1


def _print(rows: list[dict[str, Any]], models: list[str]) -> None:
    title = cell(f"models: {', '.join(models) or 'none ready'}")
    table = Table(title=title, title_justify="left")
    for column in ("worker", "role", "state", "node", "pid", "busy", "doing"):
        table.add_column(column)
    for row in rows:
        state = row["state"] if row["alive"] else "dead"
        busy = f"{row['busy']}/{row['slots']}" if row["slots"] else str(row["busy"])
        texts = (
            row["worker"],
            row["pd_role"] if row["role"] == "pd" else row["role"],
            state,
            row["node"],
            str(row["pid"]),
            busy,
            row["phase"],
        )
        table.add_row(*map(cell, texts))
    Console().print(table)
