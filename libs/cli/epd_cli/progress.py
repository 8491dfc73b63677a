"""Showing how a stack comes up: a live table on a terminal, else a line for each change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.table import Table

from epd_cli.stack import Report, StackView

_STYLES = {"ready": "green", "starting": "yellow", "failed": "red", "draining": "magenta"}


@contextlib.contextmanager
def show_progress(console: Console) -> Iterator[Report]:
    """Yields what a stack reports to."""
    if not console.is_terminal:
        yield _LinePrinter(console)
        return
    with Live(console=console, refresh_per_second=8) as live:
        yield lambda view: live.update(_table(view))


def _table(view: StackView) -> Table:
    table = Table(title=f"epdflow is starting, {view.elapsed_s:.0f} s", title_justify="left")
    for column in ("process", "state", "doing"):
        table.add_column(column)
    for name, state, phase in view.rows:
        table.add_row(name, f"[{_STYLES.get(state, '')}]{state}[/]", phase)
    return table


class _LinePrinter:
    """Prints a row when it changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seen: dict[str, tuple[str, str]] = {}

    def __call__(self, view: StackView) -> None:
        for name, state, phase in view.rows:
            if self._seen.get(name) != (state, phase):
                self._seen[name] = (state, phase)
                self._console.print(
                    f"[{view.elapsed_s:5.1f} s] {name}: {state} {phase}".rstrip(),
                    highlight=False,
                    markup=False,
                )
