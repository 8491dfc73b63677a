"""The clients: an open loop of requests whose answers are known, sent as a load balancer's clients do."""

from __future__ import annotations

import asyncio
import io
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from PIL import Image

from epd_common.client import CHAT
from epd_common.ingest.data_uri import make_data_uri
from epd_sim.answers import expected_answer

POOL = 60
PICTURES = (0, 1, 1, 2, 2, 3, 4)
FRESH = 0.3
"""The share of pictures that nobody has sent before."""

SIZES = (28, 56, 84, 112, 168)
DEADLINE_S = 30.0
TRIES = 10
WAIT_S = 2.0
"""The longest pause before the next try, whatever Retry-After says."""

ALL_TRIES_S = 60.0
"""No request takes longer than this, tries and pauses included."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: ``answered``, ``wrong``, or the code of its error."""

    number: int
    began_s: float
    took_s: float
    ended: str
    tries: int
    pictures: int
    stream: bool
    detail: str = ""


class Requests:
    """The requests of a run, each made from the seed and its number alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        rng = random.Random(f"pool-{seed}")
        self._pool = [_picture(rng) for _ in range(POOL)]

    def make(self, number: int) -> tuple[dict[str, Any], list[bytes]]:
        """A body, and the bytes of its pictures."""
        rng = random.Random(f"request-{self._seed}-{number}")
        pictures = [
            _picture(rng) if rng.random() < FRESH else rng.choice(self._pool)
            for _ in range(rng.choice(PICTURES))
        ]
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": make_data_uri(data)}} for data in pictures
        ]
        content.append({"type": "text", "text": f"request {number} of run {self._seed}"})
        body = {
            "model": "sim",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": rng.randint(8, 40),
            "stream": rng.random() < 0.5,
        }
        return body, pictures


def _picture(rng: random.Random) -> bytes:
    width, height = rng.choice(SIZES), rng.choice(SIZES)
    buffer = io.BytesIO()
    colour = (rng.randrange(256), rng.randrange(256), rng.randrange(256))
    image = Image.new("RGB", (width, height), colour)
    image.putpixel((0, 0), (rng.randrange(256), rng.randrange(256), rng.randrange(256)))
    image.save(buffer, "PNG")
    return buffer.getvalue()


class Load:
    """Sends requests at their times, whatever becomes of the others.

    What a load balancer does where it is told to: the next gateway is asked when one refuses the connection,
    answers 429 or 503, or is lost before the first byte of its answer. Lost after that, it is an error.

    Args:
        rate: Requests a second, on average; the times between them are exponential.
    """

    def __init__(
        self, gateways: Sequence[str], seed: int, *, requests: int, rate: float, began: float
    ) -> None:
        self._gateways = gateways
        self._made = Requests(seed)
        self._random = random.Random(f"times-{seed}")
        self._requests = requests
        self._rate = rate
        self._began = began
        self.sent = 0
        self.sent_again = 0
        """Requests whose gateway was lost before it had answered a byte, as often as that was."""
        self.outcomes: list[Outcome] = []

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        async with (
            httpx.AsyncClient(timeout=DEADLINE_S + 5, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            at = time.monotonic()
            for number in range(self._requests):
                at += self._random.expovariate(self._rate)
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                self.sent += 1
                group.create_task(self._one(http, number), name=f"request {number}")

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        body, pictures = self._made.make(number)
        began = time.monotonic()
        tries = 0
        detail = ""
        try:
            async with asyncio.timeout(ALL_TRIES_S):
                while True:
                    gateway = self._gateways[(number + tries) % len(self._gateways)]
                    tries += 1
                    ended, detail, again_s = await self._try(http, gateway, body, pictures)
                    if again_s is None or tries >= TRIES:
                        break
                    if tries % len(self._gateways) == 0:  # all of them were asked
                        await asyncio.sleep(min(again_s, WAIT_S))
        except TimeoutError:
            ended = "never_ended"
        self.outcomes.append(
            Outcome(
                number=number,
                began_s=began - self._began,
                took_s=time.monotonic() - began,
                ended=ended,
                tries=tries,
                pictures=len(pictures),
                stream=body["stream"],
                detail=detail,
            )
        )

    async def _try(
        self, http: httpx.AsyncClient, gateway: str, body: dict[str, Any], pictures: list[bytes]
    ) -> tuple[str, str, float | None]:
        """How it ended, more about that, and, where another try may help, the pause before it."""
        headers = {"x-epd-deadline-s": str(DEADLINE_S)}
        response = None
        try:
            async with http.stream("POST", gateway + CHAT, json=body, headers=headers) as response:
                await response.aread()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return "connection_refused", repr(error), 0.5
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            if response is None:
                self.sent_again += 1
                return "gateway_lost_before_answer", repr(error), 0.5
            return "gateway_lost_mid_answer", repr(error), None
        except httpx.TimeoutException as error:
            return "no_answer", repr(error), None
        if response.status_code in (429, 503):
            return *_error(response.json()), float(response.headers.get("retry-after", "1"))
        if response.status_code != httpx.codes.OK:
            return *_error(response.json()), None
        text, error_event = _text(response.text, streamed=body["stream"])
        if error_event is not None:
            return *_error(error_event), None
        right = expected_answer(body, pictures)
        if text != right:
            return "wrong", f"{text!r} instead of {right!r}", None
        return "answered", response.headers.get("x-epd-worker", ""), None


def _error(body: dict[str, Any]) -> tuple[str, str]:
    error = body["error"]
    return str(error["code"]), str(error["message"])


def _text(raw: str, *, streamed: bool) -> tuple[str, dict[str, Any] | None]:
    """The text of an answer, or the error event that ended it."""
    if not streamed:
        return str(json.loads(raw)["choices"][0]["message"]["content"]), None
    events = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    if not events or events[-1] != "[DONE]":
        return f"(a stream without its end: {raw[-100:]!r})", None
    text = ""
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            return text, event
        text += event["choices"][0]["delta"].get("content") or ""
    return text, None
