"""``epd demo``: the main job, on real vLLM, with pictures whose right answers are known.

It draws pictures, asks about them over REST and over NATS, and compares every answer with what was drawn.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from epd_cli.album import Album, Case
from epd_cli.connect import operator_client
from epd_cli.progress import show_progress
from epd_cli.stack import Stack, StackOptions, run_stack
from epd_common.client import CHAT
from epd_common.errors import EpdError

MAX_TOKENS = 64
TIMEOUT_S = 120.0
LOG_WIDTH = 180


@dataclass(slots=True)
class Outcome:
    """What came back for a case."""

    case: Case
    answer: str = ""
    ttft_s: float = 0.0
    origins: list[str] = field(default_factory=list)
    fault: str = ""

    @property
    def right(self) -> bool:
        if self.fault or self.origins != self.case.expected_origins:
            return False
        return self.case.expected is None or self.answer == self.case.expected


async def demo(options: StackOptions) -> int:
    """Start everything, ask, compare, stop; exit code 0 if every answer was right."""
    console = Console()
    if not console.is_terminal:  # a log has room for whole rows
        console = Console(width=LOG_WIDTH)
    began = time.monotonic()
    console.print("epdflow demo: real vLLM on this machine, the encoder in a process of its own")
    cases = Album(options.model).cases()
    with show_progress(console) as report:
        context = run_stack(options, report)
        stack = await context.__aenter__()
    started_s = time.monotonic() - began
    try:
        outcomes = []
        for case in cases:
            outcome = await _ask(stack, case)
            outcomes.append(outcome)
            _tell(console, outcome)
    finally:
        console.print("stopping")
        await context.__aexit__(None, None, None)
    console.print(_table(outcomes))
    right = sum(outcome.right for outcome in outcomes)
    total_s = time.monotonic() - began
    verdict = "PASSED" if right == len(outcomes) else "FAILED"
    console.print(
        f"{verdict}: {right} of {len(outcomes)} requests right; "
        f"start {started_s:.0f} s, in all {total_s:.0f} s",
        style="bold green" if verdict == "PASSED" else "bold red",
    )
    return 0 if verdict == "PASSED" else 1


async def _ask(stack: Stack, case: Case) -> Outcome:
    body = {
        "model": stack.models[0],
        "messages": case.messages,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    outcome = Outcome(case)
    try:
        if case.way == "NATS":
            await _over_nats(stack, body, outcome)
        elif case.way == "REST, streamed":
            await _streamed(stack, body, outcome)
        else:
            await _over_rest(stack, body, outcome)
    except (EpdError, httpx.HTTPError, LookupError, ValueError) as error:
        outcome.fault = f"{type(error).__name__}: {error}"
    return outcome


async def _over_rest(stack: Stack, body: dict[str, Any], outcome: Outcome) -> None:
    started = time.monotonic()
    async with httpx.AsyncClient(base_url=stack.gateway_url, timeout=TIMEOUT_S) as client:
        response = await client.post(CHAT, json=body)
    outcome.ttft_s = time.monotonic() - started
    outcome.origins = _origins(response)
    response.raise_for_status()
    outcome.answer = response.json()["choices"][0]["message"]["content"]


async def _streamed(stack: Stack, body: dict[str, Any], outcome: Outcome) -> None:
    started = time.monotonic()
    async with (
        httpx.AsyncClient(base_url=stack.gateway_url, timeout=TIMEOUT_S) as client,
        client.stream("POST", CHAT, json=body | {"stream": True}) as response,
    ):
        outcome.origins = _origins(response)
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            text = json.loads(line[6:])["choices"][0]["delta"].get("content")
            if text and not outcome.answer:
                outcome.ttft_s = time.monotonic() - started
            outcome.answer += text or ""


async def _over_nats(stack: Stack, body: dict[str, Any], outcome: Outcome) -> None:
    async with operator_client(stack.nats_url, stack.redis_url) as client:
        answer = await client.complete(CHAT, body, TIMEOUT_S)
    outcome.answer = answer.text
    outcome.ttft_s = answer.ttft_s
    outcome.origins = list(answer.origins)


def _origins(response: httpx.Response) -> list[str]:
    return [origin for origin in response.headers.get("x-epd-items", "").split(",") if origin]


def _tell(console: Console, outcome: Outcome) -> None:
    mark = "[green]right[/]" if outcome.right else "[red]wrong[/]"
    given = outcome.fault or outcome.answer
    console.print(f"  {mark} {outcome.case.title}: {given!r}, {outcome.ttft_s * 1000:.0f} ms")


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title="what was asked, and what came back", title_justify="left")
    for column in ("request", "way", "question", "expected", "given", "first token", "images"):
        table.add_column(column)
    for outcome in outcomes:
        case = outcome.case
        table.add_row(
            case.title,
            case.way,
            case.question,
            case.expected if case.expected is not None else "(any text)",
            outcome.fault or outcome.answer,
            f"{outcome.ttft_s * 1000:.0f} ms",
            ", ".join(outcome.origins) or "-",
            style=None if outcome.right else "red",
        )
    return table
