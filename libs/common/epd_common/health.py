"""``epd-encoder --healthcheck`` and ``epd-pd --healthcheck``: is this worker up? For containers."""

from __future__ import annotations

import asyncio
import json
import sys

import nats.errors

from epd_common.bus import Bus
from epd_common.errors import EpdError
from epd_common.protocol import subjects
from epd_common.settings import CommonSettings, SettingsError, load_settings

TIMEOUT_S = 3.0


async def ask_health(bus: Bus, worker: str, question: bytes = b"") -> dict[str, object]:
    """The answer of a worker's health endpoint; to the question ``AUDIT`` with its accounts.

    Raises:
        TimeoutError: it does not answer.
    """
    try:
        reply = await bus.client.request(f"epd.v1.health.{worker}", question, timeout=TIMEOUT_S)
    except nats.errors.NoRespondersError as error:
        raise TimeoutError(f"nobody answers as {worker}") from error
    answer: dict[str, object] = json.loads(reply.data)
    return answer


def main_healthcheck(role: str) -> int:
    """0 if the worker that ``EPD_WORKER_ID`` names takes work, else 1 and the reason."""
    try:
        settings = load_settings(CommonSettings)
        answer = asyncio.run(_ask(settings, role))
    except (SettingsError, EpdError, TimeoutError, nats.errors.Error) as error:
        print(f"{role}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer))
    return 0 if answer.get("ok") else 1


async def _ask(settings: CommonSettings, role: str) -> dict[str, object]:
    bus = Bus(
        settings.nats_url,
        name="healthcheck",
        login=settings.nats_login(),
        inbox=subjects.inbox_prefix(role),
    )
    async with bus:
        return await ask_health(bus, settings.worker_id)
