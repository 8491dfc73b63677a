"""Going on with an answer that another worker had begun: what the client has of it, and whether that can be.

The requester is asked, as it alone knows what reached it. The tokens that it was told are put behind the
prompt, and vLLM's own serving code makes the same pieces of them again, so that whatever state it keeps
(detokenizer, parsers, stop strings, usage) is that of an answer that was never interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from nats.aio.msg import Msg

from epd_common.bus import Bus
from epd_common.engines import Told
from epd_common.errors import EpdError
from epd_common.protocol import (
    GenerateJob,
    Progress,
    ProtocolError,
    ResumeRequest,
    decode,
    subjects,
)
from epd_pd.cancels import Cancels

logger = logging.getLogger(__name__)

ANSWER_S = 0.4
ASKED_TIMES = 3
"""A requester that does not answer, as one that knows nothing of this message, gets the answer from its
beginning."""

_CARRIED_BY_TOKENS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "allowed_token_ids",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "ignore_eos",
        "include_stop_str_in_output",
        "length_penalty",
        "logit_bias",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "min_p",
        "min_tokens",
        "mm_processor_kwargs",
        "model",
        "priority",
        "prompt",
        "reasoning_effort",
        "repetition_penalty",
        "seed",
        "service_tier",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "top_k",
        "top_p",
        "truncate_prompt_tokens",
        "user",
    }
)
"""Options whose effect on what follows depends on the tokens so far and nothing else."""

_NO_EFFECT: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "include_reasoning": (True,),
    "logprobs": (False,),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
"""Others, and with which values they change nothing. Penalties count the answer's tokens apart from the
prompt's, log-probabilities of what was told are gone, structured output and tools may have a state of their
own."""


def may_go_on(body: dict[str, Any]) -> bool:
    """Whether an answer to this body can be gone on with behind its tokens. Pure policy.

    An option that is not known here may have any effect.
    """
    return all(
        value is None or name in _CARRIED_BY_TOKENS or _is_one_of(value, _NO_EFFECT.get(name, ()))
        for name, value in body.items()
    ) and not isinstance(body.get("prompt"), list)


def _is_one_of(value: object, others: tuple[object, ...]) -> bool:
    """Equal and of one type: ``"logprobs": 0`` asks for some, unlike false."""
    return any(value == other and type(value) is type(other) for other in others)


def told_of(progress: Progress) -> Told:
    """The pieces that a requester has."""
    return Told(tuple(map(tuple, progress.tokens)), progress.finish)


class Resuming:
    """Asks requesters what they have. Use as an async context manager.

    Args:
        cancels: Ends older attempts here at a request that another worker has asked for.
    """

    def __init__(self, bus: Bus, cancels: Cancels) -> None:
        self._bus = bus
        self._cancels = cancels
        self._asked: dict[str, tuple[int, asyncio.Future[Progress]]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        subject = subjects.progress_subject("*")
        await self._stack.enter_async_context(self._bus.listening(subject, self._on_progress))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def ask(self, job: GenerateJob, attempt: int) -> Progress | None:
        """What the requester has; None if it does not say."""
        if not job.inbox:
            return None
        question = ResumeRequest(request_id=job.request_id, attempt=attempt)
        answer: asyncio.Future[Progress] = asyncio.get_running_loop().create_future()
        self._asked[job.request_id] = (attempt, answer)
        try:
            for _ in range(ASKED_TIMES):
                with contextlib.suppress(EpdError):
                    await self._bus.emit(job.inbox, question)
                done, _ = await asyncio.wait((answer,), timeout=ANSWER_S)
                if done:
                    return answer.result()
            return None
        finally:
            del self._asked[job.request_id]

    async def _on_progress(self, message: Msg) -> None:
        request_id = message.subject.rpartition(".")[2]
        if not self._cancels.runs(request_id):
            return  # most are another worker's, and may be long
        try:
            progress = decode(message.data, Progress)
        except ProtocolError as error:
            logger.warning("dropping a progress message: %s", error)
            return
        self._cancels.taken_over(request_id, progress.attempt)
        if request_id not in self._asked:
            return
        attempt, answer = self._asked[request_id]
        if progress.attempt == attempt and not answer.done():
            answer.set_result(progress)
