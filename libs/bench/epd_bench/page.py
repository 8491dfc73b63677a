"""A result as one HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
import html
import json
import shlex
from collections.abc import Mapping

from rich.console import Console

from epd_bench.result import Result
from epd_bench.show import show

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}pre{background:#f5f5f5;padding:1rem;overflow-x:auto;line-height:1.25}"
    "img{max-width:100%}dt{font-weight:600}dd{margin:0 0 .5rem 0}"
)


def page(result: Result, plots: Mapping[str, bytes]) -> bytes:
    """The page, plots inside."""
    facts = {
        "date": result.date,
        "server": f"{result.url}, model {result.model}",
        "command": shlex.join(result.command),
        "seed": str(result.seed),
        "machine": f"{result.machine.processor}, {result.machine.cores} cores, "
        f"{result.machine.memory_bytes / 2**30:.0f} GiB, {result.machine.system}; load average "
        f"{result.machine.load_average:.1f} at the beginning",
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in facts.items())
    images = "".join(
        f'<p><img alt="{html.escape(name)}" src="data:image/png;base64,'
        f'{base64.b64encode(data).decode()}"></p>'
        for name, data in plots.items()
    )
    workload = html.escape(json.dumps(result.workload, indent=1))
    title = html.escape(f"epd bench: {result.workload['name']}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><dl>{listed}</dl>"
        f"<pre>{html.escape(_tables(result))}</pre>{images}"
        f"<details><summary>workload</summary><pre>{workload}</pre></details></html>\n"
    ).encode()


def _tables(result: Result) -> str:
    console = Console(width=100, color_system=None, record=False, file=None, force_terminal=False)
    with console.capture() as captured:
        show(result, console)
    return captured.get()
