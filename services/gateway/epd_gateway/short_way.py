"""The routes that carry requests to a model, past the layers in which a framework looks for other ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from epd_common.errors import EpdError

Handler = Callable[[Request], Awaitable[Response]]


class ShortWay:
    """ASGI middleware, the innermost: calls a route's handler where it is posted to; all else goes on.

    Args:
        handlers: By path.
        refuse: Makes the answer of an error that a handler raises.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        handlers: Mapping[str, Handler],
        refuse: Callable[[EpdError], Response],
    ) -> None:
        self._app = app
        self._handlers = handlers
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = None
        if scope["type"] == "http" and scope["method"] == "POST":
            handler = self._handlers.get(scope["path"])
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            answer = await handler(Request(scope, receive, send))
        except EpdError as error:
            answer = self._refuse(error)
        await answer(scope, receive, send)
