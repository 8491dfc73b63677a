"""The frame that ``epd top`` shows. Pure: what was seen in, what is drawn out."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from epd_cli.checks.finding import size
from epd_cli.top.look import Look, Seen
from epd_cli.top.rates import Rates
from epd_cli.top.requests import Row
from epd_cli.visible import cell
from epd_common.protocol.subjects import LANES

_BAR = 20
_STATES = {"ready": "green", "starting": "yellow", "draining": "yellow"}
_LATE_S = 10.0
"""A job that has waited for so long is shown in red."""

_FIXED_LINES = 18
"""Of a frame without its rows of workers and requests: titles, heads, queues, an arena."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What is drawn.

    Attributes:
        clock: Time of day.
        away: Since when NATS does not answer, and why; empty while it does. What is shown is from before.
        requests: None where no gateway tells.
    """

    clock: str
    look: Look
    rates: Rates | None
    requests: list[Row] | None = None
    away: str = ""
    note: str = ""
    where: str = ""


def draw(frame: Frame, *, height: int | None = None) -> RenderableType:
    """A frame; with a height its longest tables are cut so that it fits."""
    workers = requests = None
    if height is not None:
        room = max(6, height - _FIXED_LINES - len(frame.look.arenas()))
        wanted = len(frame.requests or ())
        workers = max(3, room - min(wanted, room // 3))
        requests = max(3, room - min(workers, len(frame.look.workers)))
    parts: list[RenderableType] = [_head(frame)]
    if frame.away:
        parts.append(Text(f"NATS is away {frame.away}. What is shown is from before.", "bold red"))
    parts += [_title("workers"), _workers(frame, workers)]
    parts += [_title("queues: jobs that are not done, and the age of the oldest"), _queues(frame)]
    parts += [_title("arenas"), _arenas(frame)]
    if frame.requests is not None:
        parts += [_title("recent requests"), _requests(frame.requests, requests)]
    elif frame.note:
        parts.append(Text(frame.note, "dim"))
    return Group(*parts)


def _head(frame: Frame) -> Text:
    models = ", ".join(frame.look.models) or "none ready"
    head = Text.assemble(
        ("epd top ", "bold"), f"{frame.clock}  {frame.where}  models: ", cell(models)
    )
    if frame.rates is None:
        return head.append("\nrates: after the next look", "dim")
    each = "  ".join(f"{kind} {rate:.1f}/s" for kind, rate in frame.rates.all.items())
    return head.append("\n" + (each or "no rates yet"))


def _workers(frame: Frame, most: int | None) -> Table:
    table = _table(("worker", "role", "state", "node", "slots", "a second", "doing"))
    seen = sorted(frame.look.workers, key=_order)
    for each in seen[:most]:
        record = each.record
        slots = f"{record.busy}/{record.slots}" if record.slots else str(record.busy)
        rate = (frame.rates.workers if frame.rates else {}).get(f"{record.role}.{record.worker}")
        if rate is None:
            done = "silent" if each.alive and record.role != "gateway" and frame.rates else ""
        else:
            done = f"{rate:.1f}"
        table.add_row(
            cell(record.worker),
            cell(record.pd_role if record.role == "pd" else record.role),
            Text(each.state, _STATES.get(each.state, "bold red")),
            cell(record.node),
            slots,
            done,
            cell(record.error or record.phase),
        )
    if most is not None and len(seen) > most:
        table.add_row(f"and {len(seen) - most} more", "", "", "", "", "", "")
    if not seen:
        table.add_row("nobody is there", "", "", "", "", "", "")
    return table


def _order(seen: Seen) -> tuple[int, bool, str, str]:
    """What needs an eye comes first, so that a long list does not hide it."""
    return (0 if seen.state in ("dead", "failed") else 1, seen.alive, *_name(seen))


def _name(seen: Seen) -> tuple[str, str]:
    return (seen.record.role, seen.record.worker)


def _queues(frame: Frame) -> Table:
    table = _table(("stage", *LANES))
    for stage, lanes in frame.look.lanes.items():
        cells = []
        for lane in LANES:
            length = lanes.get(lane)
            if length is None:
                cells.append(Text("-", "dim"))
                continue
            style = "bold red" if length.oldest_s >= _LATE_S else ""
            cells.append(Text(f"{length.jobs}, {length.oldest_s:.1f} s", style))
        table.add_row(stage, *cells)
    return table


def _arenas(frame: Frame) -> Table:
    table = _table(("node", "used", "of", "fill"))
    for node, (used, quota) in sorted(frame.look.arenas().items()):
        share = min(1.0, used / quota)
        filled = round(share * _BAR)
        bar = "#" * filled + "." * (_BAR - filled)
        table.add_row(cell(node), size(used), size(quota), f"{bar} {share:4.0%}")
    return table


def _requests(rows: list[Row], most: int | None) -> Table:
    columns = ("request", "state", "model", "items", "PD worker", "first token", "end")
    table = _table(columns)
    for each in rows[:most]:
        texts = (
            each.request_id,
            each.state,
            each.model,
            each.items,
            each.pd,
            each.first,
            each.ended,
        )
        table.add_row(*map(cell, texts))
    if not rows:
        table.add_row("none yet", "", "", "", "", "", "")
    return table


def _title(text: str) -> Text:
    return Text(text, "bold")


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, header_style="dim", no_wrap=True)
    return table
