"""Answers of a gateway that drains: each closes its connection, so that the next request goes elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CloseWhileDraining:
    """ASGI middleware that adds ``connection: close``.

    A connection that were kept open would be closed at the end of the notice, perhaps just as its client
    sends a request; one that is closed with an answer is never used again.
    """

    def __init__(self, app: ASGIApp, *, draining: Callable[[], bool]) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._draining():
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, closing)
