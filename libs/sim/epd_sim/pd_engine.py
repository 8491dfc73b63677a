"""The simulated PD engine: prefills up to what is there, decodes in batches, answers in OpenAI's shape.

As with real vLLM, a request may be inside before its embeddings are there. Each is read whole, and checked,
when the prompt's prefill comes to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Literal

from epd_common.beginnings import Beginning
from epd_common.changes import Changes
from epd_common.engines import (
    AnswerHead,
    AnswerPart,
    AnswerPiece,
    EngineInfo,
    KvHandle,
    KvLostError,
    Loaded,
    Placeholder,
    Progress,
    Told,
)
from epd_common.errors import EpdError, UpstreamError
from epd_common.ingest.body import CHAT, RESPONSES
from epd_common.kept import BlockWatch, Kept
from epd_common.store import Arena
from epd_common.store.embedding import IntegrityError
from epd_sim.answers import token_of
from epd_sim.device import Sleep
from epd_sim.embedding import read_signature
from epd_sim.engine import SimEngine, SimOptions
from epd_sim.faults import Faults
from epd_sim.kv import KeptPrompts, read_kept
from epd_sim.parameters import RefusedError
from epd_sim.prefix_cache import BLOCK_TOKENS, PrefixCache
from epd_sim.replies import JSON_TYPE, STREAM_TYPE, ChoiceReplies, Replies, error_body
from epd_sim.request import PromptInside, RequestInside, read_request
from epd_sim.response_replies import ResponseReplies
from epd_sim.scheduler import Scheduler, Sequence, Step

MOST_SIGNATURES = 16_384


class SimPdEngine(SimEngine):
    """Answers with digests of what it was given.

    Args:
        arena: Gives the folders of this worker.
        max_num_seqs: Sequences that run at once, as vLLM's ``--max-num-seqs``.
        encode: Whether it shall encode items, too: ``loaded`` if the model keeps its tower in any case. That
            and its steps share one device.
        kept_prompts: Where a prefill worker's keeps what it hands over.
    """

    def __init__(
        self,
        options: SimOptions,
        *,
        arena: Arena,
        max_num_seqs: int,
        encode: Literal["never", "loaded", "always"] = "never",
        sleep: Sleep | None = None,
        kept_prompts: KeptPrompts | None = None,
    ) -> None:
        tower = encode == "always" or options.profile.keeps_tower
        encodes = tower and encode != "never"
        super().__init__(options, staging=arena.staging, encodes=encodes, sleep=sleep)
        self._pins = arena.pins
        self._faults = Faults(options.plan)
        self._max_num_seqs = max_num_seqs
        self._scheduler = Scheduler(
            max_num_seqs=max_num_seqs, budget=options.profile.prefill_budget, held=self._held
        )
        self._kept = Kept()
        self._watch = BlockWatch(self._kept.note)
        tokens = options.profile.kv_tokens if options.prefix_caching else 0
        self._cache = PrefixCache(tokens, self._watch)
        self._signatures: OrderedDict[str, bytes] = OrderedDict()
        """Of items whose rows the cache may hold."""
        self._inside: dict[Sequence, PromptInside] = {}
        self._kept_prompts = kept_prompts
        self._changes = Changes()
        self._stepping = False

    @property
    def owes(self) -> bool:
        return self._stepping or super().owes

    @property
    def kept(self) -> Kept:
        return self._kept

    async def start(self, progress: Progress) -> EngineInfo:
        if self._kept_prompts is not None:
            await self._kept_prompts.start()
        info = await super().start(progress)
        self._run("steps", self._steps)
        return info

    async def stop(self) -> None:
        if self._kept_prompts is not None:
            await self._kept_prompts.stop()
        await super().stop()

    async def answer(
        self,
        request_id: str,
        route: str,
        body: dict[str, Any],
        placeholders: list[Placeholder],
        told: Told | None = None,
        *,
        beginnings: Iterable[Beginning] = (),
        traceparent: str = "",
        hand_over: bool = False,
        kv: KvHandle | None = None,
        loaded: Loaded | None = None,
    ) -> AsyncGenerator[AnswerPart, None]:
        try:
            request = read_request(
                route,
                body,
                placeholders,
                max_model_len=self._profile.max_model_len,
                max_num_seqs=self._max_num_seqs,
            )
        except RefusedError as error:
            yield AnswerHead(400, JSON_TYPE)
            yield AnswerPiece(error_body(400, error.message, error.param))
            return
        request.begins_with(beginnings)
        if told is not None:
            request.go_on(told)
        if hand_over:
            request.prefill_only()
        if kv is not None:
            await self._load(request, kv, loaded or Loaded())
        replies: Replies = (
            ResponseReplies(request_id, body, request.parameters)
            if route == RESPONSES
            else ChoiceReplies(request_id, body["model"], chat=route == CHAT)
        )
        self._enter(request)
        try:
            if hand_over:
                yield await self._prefilled(request)
                return
            if request.parameters.stream:
                parts = _streamed(request, replies, told)
            else:
                parts = _whole(request, replies)
            async with contextlib.aclosing(parts) as answer:
                async for part in answer:
                    yield part
        except IntegrityError as error:  # this request's alone
            yield AnswerHead(500, JSON_TYPE)
            yield AnswerPiece(error_body(500, error.message))
        finally:
            self._leave(request)

    async def _prefilled(self, request: RequestInside) -> KvHandle:
        """Keep a request's prompt for another engine, once it is prefilled."""
        if self._kept_prompts is None:
            raise UpstreamError("the engine keeps no prompts for others", stage="generate")
        (prompt,) = request.prompts
        while not prompt.sequence.ended:
            await _grown(request)
        return KvHandle(self._kept_prompts.keep(prompt.signatures))

    async def _load(self, request: RequestInside, kv: KvHandle, loaded: Loaded) -> None:
        signatures = await read_kept(kv.params)
        if len(request.prompts) != 1 or len(signatures) != len(request.prompts[0].places):
            raise KvLostError("what was loaded is not of this prompt")
        loaded.loaded_tokens = request.prompts[0].load(signatures)
        await self._device.wait(self._profile.kv_load_s(loaded.loaded_tokens))

    async def wake(self) -> None:
        self._changes.note()

    def _enter(self, request: RequestInside) -> None:
        if not self.alive:
            raise _dead()
        for prompt in request.prompts:
            if not prompt.sequence.ended:
                self._inside[prompt.sequence] = prompt
                self._scheduler.add(prompt.sequence)
        self._changes.note()

    def _leave(self, request: RequestInside) -> None:
        for prompt in request.prompts:
            self._inside.pop(prompt.sequence, None)
            self._scheduler.remove(prompt.sequence)
        self._changes.note()

    async def _steps(self) -> None:
        """Compute one step after another, and sleep while there is nothing to compute."""
        while True:
            seen = self._changes.count
            # One look at each key a step, so that all who ask in it agree.
            step = self._scheduler.schedule(functools.cache(self._is_here))
            self._stepping = not step.empty
            if step.empty:
                await self._changes.since(seen)
                continue
            await self._faults.begin()
            await self._read_items(step)
            seconds = self._profile.engine_step_s(step.prefill_tokens, step.decoding)
            await self._device.compute(seconds)
            self._keep(step)
            for sequence in self._scheduler.advance(step):
                if (prompt := self._inside.get(sequence)) is not None:
                    prompt.request.changed.set()

    def _held(self, sequence: Sequence) -> int:
        """Tokens of a prompt's beginning that are cached, with what its answer shows of their items."""
        if (prompt := self._inside.get(sequence)) is None:
            return 0
        held = self._cache.held(prompt.blocks)
        for number, span in enumerate(sequence.spans):
            if span.offset >= held:
                break
            if (signature := self._signatures.get(span.key)) is None:
                return span.offset
            prompt.evidence[prompt.places[number]] = signature
        return held

    def _keep(self, step: Step) -> None:
        """Keep the blocks that a step completes."""
        for sequence, tokens in step.prefill:
            if (prompt := self._inside.get(sequence)) is not None:
                computed = sequence.computed + tokens
                self._cache.keep(prompt.blocks[: computed // BLOCK_TOKENS])
                if computed == sequence.prompt_tokens:
                    self._watch.prefilled(prompt.ends)

    def _is_here(self, key: str) -> bool:
        return (self._pins / key).exists()

    async def _read_items(self, step: Step) -> None:
        """Read the items that a step begins; one that is unfit ends its own request."""
        for sequence, tokens in step.prefill:
            for number in sequence.spans_begun(tokens):
                prompt = self._inside.get(sequence)
                if prompt is None:
                    break  # its request went away meanwhile
                try:
                    signature = await asyncio.to_thread(
                        read_signature, self._pins, prompt.expected[number], self._fingerprint
                    )
                    prompt.evidence[prompt.places[number]] = signature
                    self._remember(prompt.expected[number].key, signature)
                except IntegrityError as error:
                    self._fail(prompt.request, error)
                    break

    def _remember(self, key: str, signature: bytes) -> None:
        self._signatures[key] = signature
        self._signatures.move_to_end(key)
        if len(self._signatures) > MOST_SIGNATURES:
            self._signatures.popitem(last=False)

    def _fail(self, request: RequestInside, error: EpdError) -> None:
        request.failure = error
        request.changed.set()
        self._leave(request)

    def _die(self) -> None:
        super()._die()
        for prompt in list(self._inside.values()):
            self._fail(prompt.request, _dead())


async def _whole(
    request: RequestInside, replies: Replies
) -> AsyncGenerator[AnswerHead | AnswerPiece, None]:
    while not all(prompt.sequence.ended for prompt in request.prompts):
        await _grown(request)
    yield AnswerHead(200, JSON_TYPE)
    yield AnswerPiece(replies.whole(_texts(request), request.usage))


async def _streamed(
    request: RequestInside, replies: Replies, told: Told | None
) -> AsyncGenerator[AnswerHead | AnswerPiece, None]:
    sent = [0] * len(request.prompts)
    if told is not None:
        yield AnswerHead(200, STREAM_TYPE)
        for group in filter(None, told.tokens):
            yield _piece(request.prompts[0], 0, sent[0], sent[0] + len(group), replies)
            sent[0] += len(group)
    while sent != [prompt.sequence.answer_tokens for prompt in request.prompts]:
        await _grown(request)
        if not any(sent):
            yield AnswerHead(200, STREAM_TYPE)
        for number, prompt in enumerate(request.prompts):
            generated = prompt.sequence.generated
            if generated > sent[number]:
                yield _piece(prompt, number, sent[number], generated, replies)
                sent[number] = generated
    include_usage = request.parameters.include_usage
    for data in replies.closing(_texts(request), request.usage, include_usage=include_usage):
        yield AnswerPiece(data)


def _texts(request: RequestInside) -> list[tuple[str, str]]:
    """The whole text of each choice, and why it ended."""
    return [
        (prompt.text(choice, 0, prompt.sequence.answer_tokens), prompt.reason)
        for prompt in request.prompts
        for choice in range(prompt.sequence.choices)
    ]


def _piece(
    prompt: PromptInside, number: int, begin: int, end: int, replies: Replies
) -> AnswerPiece:
    """The events of the tokens from ``begin`` to ``end``, of all choices of a prompt."""
    sequence = prompt.sequence
    reason = prompt.reason if end == sequence.answer_tokens else None
    events = []
    for choice in range(sequence.choices):
        index = number * sequence.choices + choice
        if begin == 0:
            events.append(replies.opening(index))
        events.append(replies.piece(index, prompt.text(choice, begin, end), reason))
    tokens = tuple(map(token_of, prompt.words(0, begin, end)))
    return AnswerPiece(b"".join(events), tokens, reason or "")


async def _grown(request: RequestInside) -> None:
    """Wait until an answer has grown.

    Raises:
        EpdError: the request has failed.
    """
    await request.changed.wait()
    request.changed.clear()
    if request.failure is not None:
        raise request.failure


def _dead() -> UpstreamError:
    return UpstreamError("the engine died before it had answered", stage="generate")
