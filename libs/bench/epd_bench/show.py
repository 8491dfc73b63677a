"""Results as tables on a terminal, and what goes on meanwhile."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.table import Table

from epd_bench.goodput import Goodput
from epd_bench.load import Load
from epd_bench.quantiles import Quantiles
from epd_bench.result import Result
from epd_bench.summary import Summary
from epd_bench.target import TargetUse

_TERMINAL_S, _LINES_S = 0.25, 5.0


class Progress:
    """Shows a load: one line that is written over on a terminal, else a line every few seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = time.monotonic()

    def __call__(self, load: Load) -> bool:
        now = time.monotonic()
        if now - self._shown >= (_TERMINAL_S if self._terminal else _LINES_S):
            self._shown = now
            failed = sum(bool(outcome.failure) for outcome in load.outcomes)
            planned = f" of {load.planned}" if load.planned is not None else ""
            self._say(
                f"{now - load.began:5.0f} s: {load.sent}{planned} sent, {len(load.open)} open, "
                f"{len(load.outcomes) - failed} answered, {failed} failed"
            )
        return False

    def _say(self, line: str) -> None:
        end = "\r" if self._terminal else "\n"
        print(line.ljust(78) if self._terminal else line, end=end, file=sys.stderr, flush=True)


def show(result: Result, console: Console) -> None:
    """Print the tables of a result."""
    if result.summary is not None:
        _show_summary(result.summary, console)
    if result.goodput is not None:
        _show_goodput(result.goodput, console)
    if result.target is not None:
        _show_target(result.target, console)
    if result.client is not None:
        for warning in result.client.warnings:
            console.print(f"warning: {warning}", style="yellow", highlight=False)


def _show_summary(summary: Summary, console: Console) -> None:
    table = Table(title="milliseconds", title_justify="left")
    for column in ("", "p50", "p90", "p99", "max", "mean"):
        table.add_column(column, justify="left" if not column else "right")
    rows = (
        ("time to first token", summary.ttft),
        ("time per output token", summary.tpot),
        ("between tokens", summary.itl),
        ("whole answer", summary.e2e),
    )
    for name, values in rows:
        table.add_row(name, *_milliseconds(values))
    console.print(table)
    failures = ", ".join(f"{count} x {name}" for name, count in summary.failures.items()) or "none"
    console.print(
        f"{summary.answered} of {summary.sent} answered in {summary.lasted_s:.1f} s: "
        f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:.0f} output tokens/s\n"
        f"failures: {failures}\n"
        f"{summary.slo_share:.1%} kept {summary.slo}\n"
        f"{summary.images} images ({summary.distinct_images} distinct), "
        f"{summary.sent_bytes / 1e6:.1f} MB sent, {summary.received_bytes / 1e6:.1f} MB received",
        highlight=False,
    )


def _milliseconds(values: Quantiles) -> list[str]:
    if not values.count:
        return ["-"] * 5
    shown = (values.p50, values.p90, values.p99, values.max, values.mean)
    return [f"{value * 1e3:.1f}" for value in shown]


def _show_goodput(found: Goodput, console: Console) -> None:
    bound = f"failed at {found.failed_at:.3g}" if found.failed_at else "no rate was too much"
    console.print(
        f"[bold]goodput {found.rate:.3g} requests/s[/] ({bound}; {len(found.probes)} probes)",
        highlight=False,
    )


def _show_target(use: TargetUse, console: Console) -> None:
    table = Table(title="the server's CPU", title_justify="left")
    for column in ("role", "seconds", "ms a request"):
        table.add_column(column, justify="left" if column == "role" else "right")
    for role, seconds in use.cpu_s.items():
        table.add_row(role, f"{seconds:.2f}", f"{use.cpu_per_request_s[role] * 1e3:.2f}")
    if use.cpu_s:
        console.print(table)
    if use.counts:
        counts = ", ".join(f"{name} {count}" for name, count in use.counts.items())
        console.print(f"the stages: {counts}", highlight=False)
    if use.encodes_per_distinct_image is not None:
        console.print(
            f"encodes for each distinct image: {use.encodes_per_distinct_image:.2f}",
            highlight=False,
        )
