"""``epd up``: the whole system on one machine."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from rich.console import Console

from epd_cli.progress import show_progress
from epd_cli.stack import StackOptions, run_stack


async def up(options: StackOptions) -> int:
    """Start, print where it is, run until a signal, stop clean."""
    console = Console()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    starting = asyncio.current_task()
    assert starting is not None

    def on_signal() -> None:
        if stop.is_set():
            return
        stop.set()
        if not up_and_running:
            console.print("stopping before it is ready")
            starting.cancel()

    up_and_running = False
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        with show_progress(console) as report:
            context = run_stack(options, report)
            stack = await context.__aenter__()
    except asyncio.CancelledError:
        console.print("stopped")
        return 130
    up_and_running = True
    try:
        console.print(
            _where(stack.gateway_url, stack.models[0], options.state_dir / "state.json"),
            highlight=False,
        )
        await stack.supervise(stop, lambda text: console.print(text, style="yellow"))
        console.print("stopping: running requests are finished first")
    finally:
        await context.__aexit__(None, None, None)
    console.print("stopped")
    return 0


def _where(url: str, model: str, state: Path) -> str:
    return f"""\
[bold green]ready[/]  model [bold]{model}[/]
  OpenAI API   {url}/v1
  web page     {url}/ui
  health       {url}/ready
  metrics      {url}/metrics
  direct       epd submit --image a.png --text "What is in image #1?"
  brokers      their addresses and passwords are in {state}
Ctrl-C stops it."""
