"""Every request has an id from its first byte on, so that whoever asks why it failed can say which it was."""

from __future__ import annotations

import secrets

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"


def request_id_of(request: Request) -> str:
    """What :class:`NameRequests` has named it."""
    name: str = request.state.request_id
    return name


class NameRequests:
    """ASGI middleware: makes up an id, and says it in the answer, whatever that is.

    A client's own id is not taken: it might be another request's, and cancels go by it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = scope.setdefault("state", {})["request_id"] = secrets.token_hex(16)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        await self._app(scope, receive, named)
