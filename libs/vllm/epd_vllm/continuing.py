"""``AsyncLLM`` that notes the tokens of streamed answers, and goes on with answers that other engines began.

To go on, the request's outputs are first made again from their tokens, by vLLM's own output processor, whose
state (detokenizer, stop strings, counts) then is that of an answer of one engine. Only when the serving code
has taken the last of them does the engine get the request: with those tokens behind its prompt, and so many
fewer to generate.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from copy import copy
from typing import Any
from weakref import WeakValueDictionary

from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from epd_vllm.beginnings import attach
from epd_vllm.handover import NOTES, HandoverNotes
from epd_vllm.tape import TAPE, Tape

_FINISH = {str(reason): reason for reason in FinishReason}


class ContinuingLLM(AsyncLLM):
    """Looks at the :data:`~epd_vllm.tape.TAPE` of the task in which a request comes, at its
    :data:`~epd_vllm.beginnings.BEGINNINGS`, and at its :data:`~epd_vllm.handover.NOTES`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.notes: WeakValueDictionary[str, HandoverNotes] = WeakValueDictionary()
        """Those of requests that run, by the engine's names for these."""

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        attach(kwargs["sampling_params"] if "sampling_params" in kwargs else args[1])
        tape, notes = TAPE.get(), NOTES.get()
        async with contextlib.aclosing(super().generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                if tape is not None:
                    _note(tape, output)
                if notes is not None:
                    notes.note(output)
                yield output
                if tape is not None and tape.telling:
                    await self._tell_on(tape)

    async def _add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None,
        index: int,
        queue: RequestOutputCollector,
    ) -> None:
        tape, notes = TAPE.get(), NOTES.get()
        if notes is not None:
            self.notes[request.request_id] = notes
        if tape is None or not tape.to_tell:
            await super()._add_request(request, prompt, parent_req, index, queue)
            return
        tape.rest = None if tape.told_finish else _behind(request, tape)
        tape.telling = request.request_id
        self.output_processor.add_request(request, prompt, parent_req, index, queue)
        await self._tell_on(tape)

    async def _tell_on(self, tape: Tape) -> None:
        """Make the next output again, or have the engine generate what comes after the last one."""
        if tape.to_tell:
            tokens = list(tape.to_tell.popleft())
            finish = None if tape.to_tell else _FINISH.get(tape.told_finish)
            self.output_processor.process_outputs(
                [EngineCoreOutput(tape.telling, tokens, finish_reason=finish)]
            )
            return
        tape.telling = ""
        if tape.rest is not None:
            await self.engine_core.add_request_async(tape.rest)


def _note(tape: Tape, output: RequestOutput) -> None:
    (completion,) = output.outputs[:1] or (None,)
    if completion is not None:
        # What ends by a stop string is found to end by it once more.
        by_string = isinstance(completion.stop_reason, str)
        finish = "" if by_string else completion.finish_reason or ""
        tape.note(list(completion.token_ids), finish)


def _behind(request: EngineCoreRequest, tape: Tape) -> EngineCoreRequest:
    """The request that goes on behind the tokens that are told."""
    told = [token for group in tape.to_tell for token in group]
    params = request.sampling_params.clone()
    if params.max_tokens is not None:
        params.max_tokens -= len(told)
        if params.max_tokens < 1:
            raise ValueError(f"{len(told)} tokens were told, all that may be, and no end")
    params.min_tokens = max(0, params.min_tokens - len(told))
    changed = copy(request)
    changed.prompt_token_ids = [*request.prompt_token_ids, *told]
    changed.sampling_params = params
    return changed
