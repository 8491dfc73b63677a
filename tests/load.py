"""Steady load by a client that does what an HTTP load balancer does, and compares every answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from epd_common.tasks import end
from epd_sim.answers import expected_answer
from service_stack import BOUND_S, CHAT, picture, request_body, stream_text, text_of

TRIES = 20
LOOK_S = 0.05


@dataclass(eq=False)
class Backend:
    """One gateway as the balancer sees it."""

    http: httpx.AsyncClient
    ready: bool = True


@dataclass
class Balancer:
    """Asks gateways that say that they are ready; where one refuses the connection, or says 503, another one.

    Attributes:
        retried: Why, how often.
        wrong: Answers that were none, or not the right ones.
    """

    model: str
    backends: list[Backend] = field(default_factory=list)
    retried: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    _turns: itertools.count[int] = field(default_factory=itertools.count)
    _shared: bytes = field(default_factory=picture)

    def add(self, url: str) -> Backend:
        backend = Backend(httpx.AsyncClient(base_url=url, timeout=3 * BOUND_S))
        self.backends.append(backend)
        return backend

    async def follow(self) -> None:
        """Look at ``/ready`` of all, again and again."""
        while True:
            for backend in list(self.backends):
                try:
                    backend.ready = (await backend.http.get("/ready")).status_code == 200
                except httpx.TransportError:
                    backend.ready = False
            await asyncio.sleep(LOOK_S)

    async def post(self, body: dict[str, Any]) -> httpx.Response:
        for _ in range(TRIES):
            ready = [b for b in self.backends if b.ready] or self.backends
            backend = ready[next(self._turns) % len(ready)]
            try:
                response = await backend.http.post(CHAT, json=body)
            except httpx.ConnectError:
                backend.ready = False
                self.retried["refused"] += 1
                continue
            if response.status_code != 503:
                return response
            self.retried[response.json()["error"]["code"]] += 1
            await asyncio.sleep(LOOK_S)
        return response

    async def ask(self, number: int, *, streams: bool) -> None:
        """Ask with no, one or two pictures, one of them everybody's."""
        pictures = [picture(), self._shared][: number % 3]
        stream = streams and number % 2 == 0
        body = request_body(
            self.model, f"question {number}", *pictures, max_tokens=12, stream=stream
        )
        try:
            response = await self.post(body)
            if response.status_code != 200:
                raise AssertionError(f"{response.status_code}: {response.text}")
            found = stream_text(response.text) if stream else text_of(response)
            right = expected_answer(body, pictures)
            if found != right:
                raise AssertionError(f"{found!r} instead of {right!r}")
        except (AssertionError, httpx.TransportError) as error:
            self.wrong.append(f"{number}: {error!r}")
        else:
            self.answered += 1

    @contextlib.asynccontextmanager
    async def load(self, *, at_once: int = 4, streams: bool = True) -> AsyncIterator[None]:
        """So many requests at any time; at the end those that run are waited for."""
        stopped = asyncio.Event()
        numbers = itertools.count()

        async def user() -> None:
            while not stopped.is_set():
                await self.ask(next(numbers), streams=streams)

        following = asyncio.create_task(self.follow())
        try:
            async with asyncio.TaskGroup() as users:
                for _ in range(at_once):
                    users.create_task(user())
                try:
                    yield
                finally:
                    stopped.set()
        finally:
            await end(following)
            for backend in self.backends:
                await backend.http.aclose()

    async def more(self, answers: int) -> None:
        """Return when so many further requests were answered."""
        until = self.answered + answers
        async with asyncio.timeout(3 * BOUND_S):
            while self.answered < until and not self.wrong:  # noqa: ASYNC110 - a test's look
                await asyncio.sleep(0.01)
