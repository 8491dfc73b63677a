"""``epd dlq``: the jobs that were given up, and why.

A letter holds what somebody sent. It may be no letter at all, its texts may be meant for a terminal, and its
subject is nowhere to publish to; see ``DeadLetters.requeue``.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from epd_cli.connect import operator_bus
from epd_cli.visible import cell, visible
from epd_common.bus.dead_letters import DeadLetters, Letter
from epd_common.errors import EpdError, UnavailableError

MAX_SHOWN_BYTES = 2000


async def list_letters(nats_url: str, *, as_json: bool) -> int:
    """Print all letters; exit code 0 also where there is none."""
    async with operator_bus(nats_url, name="epd dlq") as bus:
        letters = [letter async for letter in DeadLetters(bus).all()]
    if as_json:
        print(json.dumps([_fields(letter) for letter in letters], indent=1))
        return 0
    plural = "" if len(letters) == 1 else "s"
    table = Table(title=f"{len(letters) or 'no'} dead letter{plural}", title_justify="left")
    for column in ("number", "stage", "age", "attempts", "code", "reason"):
        table.add_column(column)
    for each in letters:
        letter = each.letter
        if letter is None:
            table.add_row(str(each.number), "?", "?", "?", "unreadable", cell(each.problem))
            continue
        texts = (cell(text) for text in (letter.code, letter.reason))
        age, attempts = _age(letter.at), str(letter.attempts)
        table.add_row(str(each.number), cell(letter.stage), age, attempts, *texts)
    Console().print(table)
    return 0


async def show_letter(nats_url: str, number: int) -> int:
    """Print one letter with the job inside, without the media."""
    async with operator_bus(nats_url, name="epd dlq") as bus:
        letter = await DeadLetters(bus).get(number)
    fields = _fields(letter)
    job = letter.job()
    fields["job"] = _shown(msgspec.to_builtins(job)) if job is not None else None
    if job is None:
        payload = letter.letter.payload if letter.letter is not None else letter.raw
        fields["payload_begins"] = repr(payload[:MAX_SHOWN_BYTES])
    print(json.dumps(fields, indent=1))
    return 0


async def requeue_letters(nats_url: str, numbers: list[int], *, timeout_s: float) -> int:
    """Put jobs back into their queues; all letters if no number is given. Exit code 1 if any stays."""

    async def requeue(letters: DeadLetters, number: int) -> str:
        return f"is a job again, of {await letters.requeue(number, timeout_s=timeout_s)}"

    return await _each(nats_url, numbers, requeue)


async def drop_letters(nats_url: str, numbers: list[int]) -> int:
    """Forget letters; all if no number is given. Exit code 1 if any stays."""

    async def drop(letters: DeadLetters, number: int) -> str:
        await letters.drop(number)
        return "dropped"

    return await _each(nats_url, numbers, drop)


async def _each(
    nats_url: str, numbers: list[int], deal_with: Callable[[DeadLetters, int], Awaitable[str]]
) -> int:
    """Deal with letters, or with all; one that cannot be dealt with stays, and stops no other."""
    stays = 0
    async with operator_bus(nats_url, name="epd dlq") as bus:
        letters = DeadLetters(bus)
        for number in numbers or [letter.number async for letter in letters.all()]:
            try:
                print(f"dead letter {number} {visible(await deal_with(letters, number))}")
            except UnavailableError:  # the next one will not fare better
                raise
            except EpdError as error:
                stays += 1
                print(f"dead letter {number} stays: {visible(error.message)}", file=sys.stderr)
    return 1 if stays else 0


def _age(at: float) -> str:
    minutes = (time.time() - at) / 60
    return f"{minutes:.0f} min" if abs(minutes) < 1e6 else "?"


def _fields(letter: Letter) -> dict[str, Any]:
    if letter.letter is None:
        return {
            "number": letter.number,
            "code": "unreadable",
            "reason": letter.problem,
            "payload_bytes": len(letter.raw),
        }
    fields: dict[str, Any] = _shown(msgspec.to_builtins(letter.letter))
    fields.pop("payload")
    return {"number": letter.number, **fields, "payload_bytes": len(letter.letter.payload)}


def _shown(value: Any) -> Any:
    """What may be printed as JSON: the size of long texts, which may be pictures, and no infinite numbers."""
    if isinstance(value, dict):
        return {name: _shown(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if isinstance(value, str) and len(value) > MAX_SHOWN_BYTES:
        return f"({len(value)} characters)"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
