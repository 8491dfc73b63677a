"""How a service process starts, is told to stop, and ends.

``run_service`` is the one place that touches signals, the event loop and the exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import uvloop

from epd_common.errors import EpdError
from epd_common.settings import PREFIX, CommonSettings, SettingsError, load_settings
from epd_common.telemetry.logs import configure_logging

S = TypeVar("S", bound=CommonSettings)
logger = logging.getLogger(__name__)

ADVICE = "`epd doctor` in the same environment looks at all that it needs."
EXIT_SETTINGS = 2
EXIT_FAILED = 1
EXIT_S = 15.0
"""What the event loop may take to end once the service has."""


def run_service(
    settings_type: type[S], serve: Callable[[S, asyncio.Event], Awaitable[None]]
) -> int:
    """All of a service's ``main``: read the settings, run ``serve(settings, stop)``, give an exit code.

    ``stop`` is set by SIGTERM or SIGINT; a second signal ends the process at once.
    """
    if len(sys.argv) > 1:
        print(_usage(settings_type), file=sys.stderr)
        return 0 if sys.argv[1] in ("-h", "--help") else EXIT_SETTINGS
    try:
        settings = load_settings(settings_type)
    except SettingsError as error:
        between = " " if str(error).count("\n") == 0 else "\n"
        print(f"Settings that cannot be used:{between}{error}", file=sys.stderr)
        return EXIT_SETTINGS
    configure_logging(settings.log_level, settings.log_format)
    try:
        return uvloop.run(_supervise(settings, serve))
    except* EpdError as group:
        for leaf in _leaves(group):
            text = str(leaf)
            logger.error("service stopped: %s%s %s", text, "" if text[-1:] in ".?" else ".", ADVICE)
    except* Exception:
        logger.exception("service stopped by an unexpected error")
    return EXIT_FAILED


def _usage(settings_type: type[CommonSettings]) -> str:
    lines = [f"{settings_type.__doc__} Takes no arguments but environment variables:"]
    for name, setting in settings_type.model_fields.items():
        lines.append(f"  {PREFIX}{name.upper()}: {setting.description}")
    return "\n".join(lines)


async def _supervise(settings: S, serve: Callable[[S, asyncio.Event], Awaitable[None]]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(name: str) -> None:
        if stop.is_set():
            logger.warning("second %s: ending at once", name)
            os._exit(EXIT_FAILED)
        logger.info("%s: stopping", name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    # What the imports made lives until the end: the collector need not walk it again at each full round.
    gc.collect()
    gc.freeze()
    try:
        await serve(settings, stop)
    finally:
        _end_for_certain()
    return 0


def _end_for_certain() -> None:
    """End the process even where the event loop does not, as it waits for a thread that hangs."""

    def give_up() -> None:
        logger.error("the process did not end within %g s after its work; ending it", EXIT_S)
        os._exit(EXIT_FAILED)

    last = threading.Timer(EXIT_S, give_up)
    last.daemon = True
    last.start()


def _leaves(group: BaseExceptionGroup[EpdError]) -> list[EpdError]:
    found: list[EpdError] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found


async def wait_any(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Wait until one of the events is set or the time is over."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
