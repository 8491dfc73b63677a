"""``epd submit``: one request straight over NATS, with no gateway in between."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console

from epd_cli.connect import operator_client
from epd_common.errors import BadRequestError


async def submit(
    *,
    nats_url: str,
    redis_url: str,
    images: list[Path],
    text: str,
    model: str,
    max_tokens: int,
    temperature: float,
    timeout_s: float,
) -> int:
    """Ask, and print the answer; what became of each picture goes to standard error."""
    pictures = [await asyncio.to_thread(_read, path) for path in images]
    async with operator_client(nats_url, redis_url) as client:
        answer = await client.chat(
            text,
            images=pictures,
            model=model,
            timeout_s=timeout_s,
            max_tokens=max_tokens,
            temperature=temperature,
        )
    print(answer.text)
    notes = Console(stderr=True)
    origins = ", ".join(answer.origins) or "none"
    notes.print(f"images: {origins}; first frame after {answer.ttft_s * 1000:.0f} ms", style="dim")
    return 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadRequestError(f"cannot read {path}: {error.strerror}") from error
