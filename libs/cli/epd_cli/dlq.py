"""``epd dlq``: the jobs that were given up, and why."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from epd_cli.connect import operator_bus
from epd_common.bus.dead_letters import DeadLetters, Letter

MAX_SHOWN_BYTES = 2000


async def list_letters(nats_url: str, *, as_json: bool) -> int:
    """Print all letters; exit code 0 also where there is none."""
    async with operator_bus(nats_url, name="epd dlq") as bus:
        letters = [letter async for letter in DeadLetters(bus).all()]
    if as_json:
        print(json.dumps([_fields(letter) for letter in letters], indent=1))
        return 0
    table = Table(title=f"{len(letters)} dead letters", title_justify="left")
    for column in ("number", "stage", "age", "attempts", "code", "reason"):
        table.add_column(column)
    for each in letters:
        letter = each.letter
        age = f"{(time.time() - letter.at) / 60:.0f} min"
        attempts, number = str(letter.attempts), str(each.number)
        table.add_row(number, letter.stage, age, attempts, letter.code, letter.reason)
    Console().print(table)
    return 0


async def show_letter(nats_url: str, number: int) -> int:
    """Print one letter with the job inside, without the media."""
    async with operator_bus(nats_url, name="epd dlq") as bus:
        letter = await DeadLetters(bus).get(number)
    fields = _fields(letter)
    job = letter.job()
    fields["job"] = _without_bytes(msgspec.to_builtins(job)) if job is not None else None
    if job is None:
        fields["payload_begins"] = repr(letter.letter.payload[:MAX_SHOWN_BYTES])
    print(json.dumps(fields, indent=1))
    return 0


async def requeue_letters(nats_url: str, numbers: list[int], *, timeout_s: float) -> int:
    """Put jobs back into their queues; all letters if no number is given."""
    async with operator_bus(nats_url, name="epd dlq") as bus:
        letters = DeadLetters(bus)
        for number in numbers or [letter.number async for letter in letters.all()]:
            await letters.requeue(number, timeout_s=timeout_s)
            print(f"dead letter {number} is a job again")
    return 0


async def drop_letters(nats_url: str, numbers: list[int]) -> int:
    """Forget letters; all if no number is given."""
    async with operator_bus(nats_url, name="epd dlq") as bus:
        letters = DeadLetters(bus)
        for number in numbers or [letter.number async for letter in letters.all()]:
            await letters.drop(number)
            print(f"dead letter {number} dropped")
    return 0


def _fields(letter: Letter) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(letter.letter)
    fields.pop("payload")
    return {"number": letter.number, **fields, "payload_bytes": len(letter.letter.payload)}


def _without_bytes(value: Any) -> Any:
    """The job with the size of long texts in their place: they may be pictures."""
    if isinstance(value, dict):
        return {name: _without_bytes(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_bytes(each) for each in value]
    if isinstance(value, str) and len(value) > MAX_SHOWN_BYTES:
        return f"({len(value)} characters)"
    return value
