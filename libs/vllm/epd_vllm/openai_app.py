"""vLLM's own OpenAI application, called in this process over raw ASGI: no port, no socket.

Routes, chat templates, tool parsers and streaming are vLLM's. Closing a call's generator is a client's
disconnect to the application, which aborts the request in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from argparse import Namespace
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from epd_common.beginnings import Beginning
from epd_common.engines import AnswerHead, AnswerPiece
from epd_vllm.beginnings import BEGINNINGS
from epd_vllm.handover import NOTES, HandoverNotes
from epd_vllm.tape import TAPE, Tape

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

CLOSE_TIMEOUT_S = 5.0

# Starlette looks for a disconnect while it streams only below ASGI spec version 2.4.
_ASGI = {"version": "3.0", "spec_version": "2.3"}


def parse_arguments(arguments: list[str]) -> Namespace:
    """Arguments as ``vllm serve`` takes them."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers import cli_args  # up to 0.32
    except ImportError:
        from vllm.entrypoints.common import cli_args  # 0.33
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    parsed: Namespace = parser.parse_args(arguments)
    cli_args.validate_parsed_serve_args(parsed)
    return parsed


class OpenAIApp:
    """The application of one engine."""

    def __init__(self, application: Any) -> None:
        self.application = application

    @classmethod
    async def build(cls, engine: AsyncLLM, arguments: Namespace) -> OpenAIApp:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        tasks = await engine.get_supported_tasks()
        with _levels_kept():
            app = build_app(arguments, tasks, engine.model_config)
        await init_app_state(engine, app.state, arguments, tasks)
        return cls(app)

    async def call(
        self,
        path: str,
        body: bytes,
        *,
        request_id: str,
        tape: Tape | None = None,
        beginnings: Sequence[Beginning] = (),
        traceparent: str = "",
        notes: HandoverNotes | None = None,
    ) -> AsyncGenerator[AnswerHead | AnswerPiece, None]:
        """POST a JSON body: the head, then pieces of the body as the application sends them.

        Args:
            tape: Notes the tokens of the pieces.
            beginnings: Go with the request to the engine.
            traceparent: Sent as the header of that name, unless empty.
            notes: Note what the engine says of keys and values.
        """
        sent: asyncio.Queue[AnswerHead | AnswerPiece | None] = asyncio.Queue()
        gone = asyncio.Event()
        requests = iter(({"type": "http.request", "body": body, "more_body": False},))

        async def receive() -> dict[str, Any]:
            for message in requests:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = {name.lower(): value for name, value in message["headers"]}
                content_type = headers.get(b"content-type", b"application/json").decode()
                sent.put_nowait(AnswerHead(message["status"], content_type))
            elif chunk := message.get("body"):
                sent.put_nowait(AnswerPiece(chunk) if tape is None else tape.piece(chunk))

        scope = _scope(path, body, request_id)
        if traceparent:
            scope["headers"].append((b"traceparent", traceparent.encode()))

        async def run() -> None:
            TAPE.set(tape)
            BEGINNINGS.set(beginnings)
            NOTES.set(notes)
            try:
                await self.application(scope, receive, send)
            finally:
                sent.put_nowait(None)

        task = asyncio.create_task(run(), name=f"openai {request_id}")
        try:
            while (part := await sent.get()) is not None:
                yield part
            await task  # raises what the application raised
        finally:
            gone.set()
            done, _ = await asyncio.wait((task,), timeout=CLOSE_TIMEOUT_S)
            if not done:
                task.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await task


@contextlib.contextmanager
def _levels_kept() -> Iterator[None]:
    """vLLM's application sets the root logger to errors alone, which would silence the whole service."""
    root = logging.getLogger()
    level, levels = root.level, [(handler, handler.level) for handler in root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        for handler, own in levels:
            handler.setLevel(own)


def _scope(path: str, body: bytes, request_id: str) -> dict[str, Any]:
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
    ]
    return {
        "type": "http",
        "asgi": _ASGI,
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
        "headers": headers,
    }
