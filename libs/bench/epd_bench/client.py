"""Sends requests to an OpenAI-compatible server and times the answers; as light as it can be."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from epd_bench.bodies import BodyMaker
from epd_bench.errors import BenchError
from epd_bench.stream import StreamEnd, StreamWatch, error_code
from epd_bench.workloads import Request

CHAT = "/v1/chat/completions"
_ASK_S = 10.0
_ERROR_BYTES = 64 << 10


class Outcome(msgspec.Struct, kw_only=True):
    """How one request went. Times in seconds, by the client's monotonic clock.

    Attributes:
        at_s: When it was sent, after the beginning of the run.
        late_s: How much later that was than it should have been.
        status: Of HTTP; 0 if there was none.
        failure: Empty if the answer came whole, else what happened in a word or two.
        detail: More about a failure.
        ttft_s: To the first token; -1 if none came.
        tpot_s: For each token after the first one; -1 with fewer than two.
        output_tokens: By the server's usage, else the events that brought tokens.
    """

    number: int
    kind: int
    images: int
    at_s: float = 0.0
    late_s: float = 0.0
    status: int = 0
    failure: str = ""
    detail: str = ""
    ttft_s: float = -1.0
    tpot_s: float = -1.0
    e2e_s: float = 0.0
    prompt_tokens: int = -1
    output_tokens: int = 0
    usage: bool = False
    sent_bytes: int = 0
    received_bytes: int = 0
    gaps_s: list[float] = []


class Client:
    """Asks one server, or several in turn. An async context manager.

    Args:
        url: Of the server, with or without ``/v1``; several with commas between them.
        api_key: Sent as a bearer token, if any.
        timeout_s: A request that takes longer has failed.
    """

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 120.0) -> None:
        urls = [one.strip().rstrip("/").removesuffix("/v1") for one in url.split(",")]
        for one in urls:
            if not one.startswith(("http://", "https://")):
                raise BenchError(f"{one!r} is no address of a server; write http://HOST:PORT")
        self.url = ",".join(urls)
        self._first = urls[0]
        self._turns = itertools.cycle(urls)
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        # No limit: it would make requests wait here, and the server look fast.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            headers=self._headers,
            auto_decompress=False,
            skip_auto_headers=("accept-encoding",),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """The models that the first server says it has.

        Raises:
            BenchError: it does not answer, or not like an OpenAI-compatible server.
        """
        url = f"{self._first}/v1/models"
        try:
            async with asyncio.timeout(_ASK_S), self._session.get(url) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {_ASK_S:g} s"
            raise BenchError(f"{url} does not answer: {reason}", code="endpoint_silent") from error
        if response.status != 200:
            raise BenchError(f"{url} answered {response.status}: {text[:300]}")
        try:
            return [str(model["id"]) for model in json.loads(text)["data"]]
        except (ValueError, LookupError, TypeError):
            raise BenchError(
                f"{url} did not answer with a list of models, so it is no OpenAI-compatible server: "
                f"{text[:200]!r}"
            ) from None

    async def ask(self, request: Request, body: bytes, watch: StreamWatch | None = None) -> Outcome:
        """Send one request and read its answer; whatever goes wrong is part of the outcome.

        Args:
            watch: Is shown the stream, for who wants to see it meanwhile.
        """
        watch = watch or StreamWatch()
        outcome = Outcome(
            number=request.number,
            kind=request.kind,
            images=len(request.pictures),
            sent_bytes=len(body),
        )
        began = time.monotonic()
        try:
            async with self._session.post(f"{next(self._turns)}{CHAT}", data=body) as response:
                outcome.status = response.status
                if response.status == 200:
                    async for data in response.content.iter_any():
                        watch.feed(data, time.monotonic())
                        outcome.received_bytes += len(data)
                    ended = time.monotonic()
                    _read_end(outcome, watch.end())
                else:
                    ended = time.monotonic()
                    await _read_error(outcome, response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            ended = time.monotonic()
            outcome.failure = _failure(error)
            outcome.detail = str(error)[:300]
        outcome.e2e_s = ended - began
        _read_times(outcome, watch, began)
        return outcome


def _read_end(outcome: Outcome, end: StreamEnd) -> None:
    outcome.failure = end.error
    outcome.prompt_tokens = end.prompt_tokens
    outcome.usage = end.completion_tokens >= 0
    outcome.output_tokens = max(0, end.completion_tokens)


def _read_times(outcome: Outcome, watch: StreamWatch, began: float) -> None:
    if not watch.first_token_at:
        return
    if not outcome.usage:
        outcome.output_tokens = watch.events
    outcome.ttft_s = watch.first_token_at - began
    outcome.gaps_s = list(watch.gaps_s)
    if outcome.output_tokens > 1:
        spent = watch.last_token_at - watch.first_token_at
        outcome.tpot_s = spent / (outcome.output_tokens - 1)


async def _read_error(outcome: Outcome, response: aiohttp.ClientResponse) -> None:
    raw = await response.content.read(_ERROR_BYTES)
    outcome.received_bytes += len(raw)
    outcome.detail = raw[:300].decode(errors="replace")
    try:
        code = error_code(json.loads(raw))
    except ValueError:
        code = ""
    outcome.failure = " ".join(filter(None, (str(response.status), code)))


def _failure(error: Exception) -> str:
    match error:
        case aiohttp.ClientConnectorError():
            return "no_connection"
        case TimeoutError():
            return "timeout"
        case aiohttp.ClientPayloadError():
            return "cut_off"
        case _:
            return "connection_lost"


def default_fields(*, ignore_eos: bool, temperature: float | None) -> Mapping[str, Any]:
    """Fields of every body beside the messages."""
    fields: dict[str, Any] = {}
    if ignore_eos:
        fields["ignore_eos"] = True
    if temperature is not None:
        fields["temperature"] = temperature
    return fields


def body_maker(model: str, seed: int, *, ignore_eos: bool, temperature: float | None) -> BodyMaker:
    """Writes the bodies of a run."""
    fields = default_fields(ignore_eos=ignore_eos, temperature=temperature)
    return BodyMaker(model, seed, fields)
