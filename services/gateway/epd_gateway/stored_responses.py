"""Answers that a client asks for again: none is kept, whatever its ``store`` said."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from epd_common.errors import NotFoundError

_ONE = "/v1/responses/{response_id}"


def add_stored_response_routes(app: FastAPI) -> None:
    """The routes that read, delete or cancel an answer by its id."""
    for path, method in (
        (_ONE, "GET"),
        (_ONE, "DELETE"),
        (f"{_ONE}/cancel", "POST"),
        (f"{_ONE}/input_items", "GET"),
    ):
        app.add_api_route(path, _not_kept, methods=[method])


async def _not_kept(response_id: str) -> Any:
    raise NotFoundError(
        f"there is no response {response_id[:100]!r}: answers are not kept here, and one that runs ends when "
        "its client closes the connection",
        code="response_not_found",
        param="response_id",
    )
