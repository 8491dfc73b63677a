"""What vLLM's ``/v1/responses`` does otherwise than its older routes, evened out.

It names an answer by a field of the body, keeps answers in this worker's memory if told to, sends the first
events of a stream before the engine has begun, and breaks a stream off where the other routes say an error.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from epd_common.engines import AnswerHead, AnswerPiece
from epd_common.errors import EpdError, UpstreamError, openai_body

logger = logging.getLogger(__name__)

JSON_TYPE = "application/json"


def name_answer(body: dict[str, Any], request_id: str) -> None:
    """Give the answer an id that is the same for every attempt at it, and have vLLM keep none."""
    body["request_id"] = f"resp_{request_id}"
    body["store"] = False


async def held_back(
    parts: AsyncGenerator[AnswerHead | AnswerPiece, None], *, request_id: str
) -> AsyncGenerator[AnswerHead | AnswerPiece, None]:
    """A stream whose first events come with its first tokens, and that ends by an error where vLLM fails.

    Until there are tokens it can still fail with a status of its own, and another worker can begin it.

    Raises:
        UpstreamError: vLLM broke it off after it had begun.
    """
    waiting: list[AnswerHead | AnswerPiece] = []
    begun = False
    try:
        async for part in parts:
            if not begun and not _has_tokens(part):
                waiting.append(part)
                continue
            begun = True
            for held in waiting:
                yield held
            waiting.clear()
            yield part
    except EpdError:
        raise
    except Exception as error:  # whatever it is, it is this answer's end
        logger.exception("vLLM broke an answer off", extra={"request_id": request_id})
        said = UpstreamError(
            "the engine broke the answer off; the worker's log says more", stage="generate"
        )
        if begun:
            raise said from error
        waiting = [
            AnswerHead(said.status, JSON_TYPE),
            AnswerPiece(msgspec.json.encode(openai_body(said))),
        ]
    for held in waiting:
        yield held


def _has_tokens(part: AnswerHead | AnswerPiece) -> bool:
    return isinstance(part, AnswerPiece) and bool(part.tokens or part.finish)
