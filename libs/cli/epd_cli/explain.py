"""``epd explain``: what became of a request, stage by stage."""

from __future__ import annotations

import json
import sys
from typing import Any

import nats.errors
from rich.console import Console
from rich.table import Table
from rich.text import Text

from epd_cli.connect import operator_bus
from epd_cli.visible import cell, visible
from epd_common.errors import BadRequestError, UnavailableError
from epd_common.protocol import subjects

WITHIN_S = 2.0
"""A gateway that knows the request answers in less."""

_ENCODE_STAGES = ("queued", "media", "encode", "publish")

WIDTH = 32
"""Columns of the bars: with the rest, less than a terminal's 80."""


async def explain(nats_url: str, request_id: str, *, as_json: bool) -> int:
    """Print the trail that its gateway remembers; exit code 1 if no gateway does.

    Raises:
        BadRequestError: this cannot be a request's id.
    """
    if not subjects.is_request_id(request_id):
        raise BadRequestError(f"{request_id[:128]!r} cannot be a request's id; see x-request-id")
    async with operator_bus(nats_url, name="epd explain") as bus:
        try:
            answer = await bus.client.request(
                subjects.explain_subject(request_id), b"", timeout=WITHIN_S
            )
        except (nats.errors.NoRespondersError, TimeoutError):
            print(
                f"epd explain: no gateway remembers the request {request_id}: each keeps its latest ones, "
                "until it ends",
                file=sys.stderr,
            )
            return 1
        except nats.errors.Error as error:
            raise UnavailableError(
                f"NATS did not carry the question ({error}); ask again"
            ) from error
    trail: dict[str, Any] = json.loads(answer.data)
    if as_json:
        print(json.dumps(trail, indent=1))
    else:
        _print(Console(), trail)
    return 0


def _print(console: Console, trail: dict[str, Any]) -> None:
    console.print(cell(headline(trail)))
    for line in receipt(trail):
        console.print(cell(f"  {line}"))
    spans = stages(trail)
    end = max((span[2] for span in spans), default=0.0) or 1.0
    table = Table(box=None, pad_edge=False, show_header=True)
    for name in ("stage", "from", "to", ""):
        table.add_column(name, justify="left" if name in ("stage", "") else "right", no_wrap=True)
    for name, begin, until in spans:
        table.add_row(cell(name), _ms(begin), _ms(until), Text(bar(begin, until, end)))
    console.print(table)


def headline(trail: dict[str, Any]) -> str:
    """The request and its end, in one line."""
    status = trail["status"] or "no status yet"
    took = "" if trail["ended_s"] is None else f" after {_ms(trail['ended_s'])}"
    first = "" if trail["first_s"] is None else f", first byte after {_ms(trail['first_s'])}"
    return (
        f"{trail['request_id']}  {trail['model']}  {trail['route']}: {trail['state']} ({status})"
        f"{took}{first}"
    )


def receipt(trail: dict[str, Any]) -> list[str]:
    """Who did it and what it took, a line each."""
    lines = []
    if trail["error"]:
        error = trail["error"]
        lines.append(f"error {error['code']} in stage {error['stage'] or '-'}: {error['message']}")
    pd, prefill = trail["pd"], trail.get("prefill")
    if first := prefill or pd:
        name = "prefill worker" if prefill else "PD worker"
        lines.append(
            f"{name} {first['worker']} on node {first['node']}, attempt {first['attempt']}; placed: "
            f"{trail['placement']}; about {first['prompt_tokens']} prompt tokens"
        )
    if prefill:
        lines.append(
            f"decode worker {pd['worker']} on node {pd['node']}, attempt {pd['attempt']}; "
            f"loaded {pd['loaded_tokens']} tokens"
        )
    if pd:
        if pd["resumed_tokens"]:
            lines.append(f"went on behind {pd['resumed_tokens']} tokens of a worker that was lost")
        if pd["restarts"]:
            lines.append(f"prompt made anew {pd['restarts']} times, as a size was forecast wrong")
    for number, item in enumerate(trail["items"], 1):
        rescue = {"ordered": ", ordered again", "local": ", encoded by the PD worker"}
        lines.append(
            f"{item['modality']} {number}: {item['origin']}"
            + (f" by {item['encoder']}" if item["encoder"] else "")
            + (f", from {item['store']}, {item['bytes']:,} bytes" if item["store"] else "")
            + rescue.get(item["rescue"], "")
        )
    return lines


def stages(trail: dict[str, Any]) -> list[tuple[str, float, float]]:
    """The stages that are known, with their begin and end in seconds since the request's arrival."""
    found: list[tuple[str, float | None, float | None]] = [("ingest", 0.0, trail["ingested_s"])]
    for number, item in enumerate(trail["items"], 1):
        name = f"{item['modality']} {number}"
        if item["encode_s"] is not None and item["ready_s"] is not None:
            begin = item["ready_s"] - sum(item[f"{stage}_s"] for stage in _ENCODE_STAGES)
            for stage in _ENCODE_STAGES:
                until = begin + item[f"{stage}_s"]
                if until > 0:  # else it was done for a request before this one
                    found.append((f"{name} {stage}", max(begin, 0.0), until))
                begin = until
        found.append((f"{name} to PD", item["ready_s"], item["pinned_s"]))
    if pd := trail["pd"]:
        queued, behind = ("queued for PD", trail["published_s"]), ""
        if prefill := trail.get("prefill"):
            found += _to_the_engine(prefill, ("queued for prefill", trail["published_s"]))
            found.append(("prefill", prefill["entered_s"], prefill["first_s"]))
            queued, behind = ("hand-over", prefill["first_s"]), " (decode)"
        found += _to_the_engine(pd, queued, behind)
        work = "load" if pd.get("loaded_tokens") else f"prefill{behind}"
        name = work if trail["stream"] else f"{work} and decode"
        found.append((name, pd["entered_s"], pd["first_s"]))
        if trail["stream"]:
            found.append(("decode", pd["first_s"], pd["ended_s"]))
    return [
        (name, begin, until)
        for name, begin, until in found
        if begin is not None and until is not None
    ]


def _to_the_engine(
    worker: dict[str, Any], queued: tuple[str, float | None], behind: str = ""
) -> list[tuple[str, float | None, float | None]]:
    """How a request came to a worker and into its engine; the first part has a name and a begin."""
    came = [
        (*queued, worker["pulled_s"]),
        (f"prepare{behind}", worker["pulled_s"], worker["prepared_s"]),
        (f"wait for items{behind}", worker["prepared_s"], worker["entered_s"]),
    ]
    return came[:2] if worker.get("loaded_tokens") else came


def bar(begin: float, until: float, end: float) -> str:
    """A stage as a bar on an axis that goes to ``end`` and is ``WIDTH`` columns wide."""
    left = min(int(begin / end * WIDTH), WIDTH - 1)
    right = max(left + 1, min(round(until / end * WIDTH), WIDTH))
    return visible(" " * left + "━" * (right - left))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
