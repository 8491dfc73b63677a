"""The loop of ``epd top``: look, draw, wait."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live

from epd_cli.connect import operator_bus
from epd_cli.top.look import Look, look
from epd_cli.top.rates import Rates, rates
from epd_cli.top.requests import RecentRequests, Row
from epd_cli.top.view import Frame, draw
from epd_common.bus import Bus, Registry
from epd_common.errors import UnavailableError
from epd_common.lifecycle import wait_any

PIPE_WIDTH = 140
"""Columns where there is no terminal that has a width, unless ``COLUMNS`` says otherwise."""

ONCE_S = 1.0
"""Between the two looks that one frame's rates come from."""


@dataclass(slots=True)
class Watch:
    """Looks again and again, and keeps what it saw last while NATS is away."""

    bus: Bus
    registry: Registry
    requests: RecentRequests
    where: str = ""
    seen: Look = field(default_factory=lambda: Look(time.monotonic()))
    rates: Rates | None = None
    rows: list[Row] | None = None
    away: str = ""
    away_since: float = 0.0

    async def frame(self) -> Frame:
        """Look once more.

        Raises:
            UnavailableError: NATS ended the connection for good.
        """
        if self.bus.lost.is_set():
            raise UnavailableError("NATS ended the connection for good: is the user still let in?")
        try:
            now = await look(self.bus, self.registry)
        except UnavailableError as error:
            self._note_away(error)
        else:
            first = not self.seen.lanes
            self.rates = None if first or self.away else rates(self.seen, now)
            self.seen, self.away = now, ""
            urls = [
                each.record.phase
                for each in now.workers
                if each.record.role == "gateway" and each.alive
            ]
            self.rows = await self.requests.rows(urls)
        return Frame(
            clock=time.strftime("%H:%M:%S"),
            look=self.seen,
            rates=self.rates,
            requests=self.rows,
            away=self.away,
            note=self.requests.note,
            where=self.where,
        )

    def _note_away(self, error: UnavailableError) -> None:
        now = time.time()
        if not self.away:
            self.away_since = now
        since = time.strftime("%H:%M:%S", time.localtime(self.away_since))
        self.away = f"since {since}, {now - self.away_since:.0f} s ({error.message})"


async def top(
    nats_url: str,
    *,
    gateway_url: str = "",
    once: bool = False,
    interval_s: float = 1.0,
    console: Console | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Show frames until Ctrl-C, or one.

    Args:
        gateway_url: Whose requests are shown; empty: one of those in the registry.
        console: Where to; default: standard output.
        stop: Ends it, as Ctrl-C does.

    Raises:
        UnavailableError: NATS is away at the start.
    """
    stop = stop or asyncio.Event()
    console = console or _console()
    async with (
        operator_bus(nats_url, name="epd top") as bus,
        Registry(bus) as registry,
        RecentRequests(gateway_url) as requests,
    ):
        watch = Watch(bus, registry, requests, where=bus.address)
        if once:
            await watch.frame()
            await asyncio.sleep(min(ONCE_S, interval_s))
            console.print(draw(await watch.frame()))
            return 0
        with _until_signalled(stop):
            await _show(watch, console, stop, interval_s)
    return 0


async def _show(watch: Watch, console: Console, stop: asyncio.Event, interval_s: float) -> None:
    if not console.is_terminal:
        with _reader_may_go():
            while not stop.is_set():
                console.print(draw(await watch.frame()), "")
                console.file.flush()
                await wait_any(stop, timeout_s=interval_s)
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not stop.is_set():
            live.update(draw(await watch.frame(), height=console.height), refresh=True)
            await wait_any(stop, timeout_s=interval_s)


class _Output(Console):
    """Leaves a pipe whose reader has gone to this module: rich would end the process there and then."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console() -> Console:
    console = _Output()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return _Output(width=PIPE_WIDTH)
    return console


@contextlib.contextmanager
def _until_signalled(stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the view in order, so that the terminal comes back as it was."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _reader_may_go() -> Iterator[None]:
    """A pipe whose reader has gone (``epd top | head``) ends it; nothing is left to be written at exit."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
