"""One request inside a simulated PD engine: its prompts as sequences, and what its embeddings held."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from epd_common.beginnings import Beginning
from epd_common.engines import Placeholder, Told
from epd_common.errors import BadRequestError, EpdError
from epd_sim.answers import answer_length, answer_words, prompts_of, word_of
from epd_sim.parameters import Parameters, RefusedError, read_parameters
from epd_sim.prefix_cache import BLOCK_TOKENS, blocks_of, item_tokens, text_tokens
from epd_sim.prompts import ITEM_TOKENS, MediaPart, Prompt
from epd_sim.replies import Usage
from epd_sim.scheduler import Sequence, Span
from epd_sim.sizing import rows_of


@dataclass(slots=True, eq=False)
class PromptInside:
    """One prompt: its sequence, and the words of its answers once its embeddings are read.

    Attributes:
        evidence: Texts, and signatures in the places of items; empty ones until they are read.
        places: Of each item in ``evidence``.
        blocks: Names of the prompt's whole blocks, for the prefix cache.
        ends: Beginnings by which others know the prompt, and the blocks in which they end.
        told: Words that another engine has told, with which the answer begins.
    """

    sequence: Sequence
    reason: str
    evidence: list[str | bytes]
    places: list[int]
    expected: list[Placeholder]
    request: RequestInside
    blocks: list[bytes]
    ends: list[tuple[str, bytes]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    _words: list[list[str]] = field(default_factory=list)

    def words(self, choice: int, begin: int, end: int) -> list[str]:
        """The words from ``begin`` to ``end`` of an answer."""
        if end <= len(self.told):
            return self.told[begin:end]
        if not self._words:
            count = self.sequence.answer_tokens
            self._words = [
                answer_words(self.evidence, count, choice=number)
                for number in range(self.sequence.choices)
            ]
        return [*self.told[begin:], *self._words[choice][max(begin, len(self.told)) : end]]

    @property
    def signatures(self) -> list[bytes]:
        """What the prompt's items were found to be, in their order."""
        found = (self.evidence[place] for place in self.places)
        return [signature for signature in found if isinstance(signature, bytes)]

    def load(self, signatures: list[bytes]) -> int:
        """Take over what another engine has prefilled: all but the last token, which gives the first of the
        answer.

        Returns:
            How many tokens of the prompt that are.
        """
        for place, signature in zip(self.places, signatures, strict=True):
            self.evidence[place] = signature
        self.sequence.cached = self.sequence.computed = self.sequence.prompt_tokens - 1
        return self.sequence.computed

    def text(self, choice: int, begin: int, end: int) -> str:
        """Those words as text, which goes on from that of the words before."""
        return " ".join([""] * (begin > 0) + self.words(choice, begin, end))


@dataclass(slots=True, eq=False)
class RequestInside:
    """A request that is being answered.

    Attributes:
        changed: An answer has grown, or the request has failed.
        failure: Why it cannot be answered.
    """

    parameters: Parameters
    prompts: list[PromptInside] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    failure: EpdError | None = None

    @property
    def usage(self) -> Usage:
        sequences = [prompt.sequence for prompt in self.prompts]
        return Usage(
            sum(prompt.sequence.prompt_tokens - len(prompt.told) for prompt in self.prompts),
            sum(sequence.answer_tokens * sequence.choices for sequence in sequences),
            sum(sequence.cached for sequence in sequences),
        )

    def begins_with(self, beginnings: Iterable[Beginning]) -> None:
        """Note where the beginnings of its prompt end; none is known of a request of several prompts."""
        if len(self.prompts) > 1:
            return
        (prompt,) = self.prompts
        tokens = prompt.sequence.prompt_tokens
        ends = [(named.key, int(named.share * tokens) // BLOCK_TOKENS) for named in beginnings]
        prompt.ends = [(key, prompt.blocks[count - 1]) for key, count in ends if count]

    def prefill_only(self) -> None:
        """Nothing but the prompt is wanted of it."""
        for prompt in self.prompts:
            prompt.sequence.answer_tokens = 1

    def go_on(self, told: Told) -> None:
        """The answer begins with words that another engine has told; they stand behind the prompt.

        Raises:
            BadRequestError: they cannot be those of this request.
        """
        prompt = self.prompts[0]
        sequence = prompt.sequence
        words = [word_of(token) for group in told.tokens for token in group]
        if len(self.prompts) > 1 or sequence.choices > 1 or len(words) > sequence.answer_tokens:
            raise BadRequestError(f"{len(words)} tokens cannot have been told", stage="generate")
        prompt.told = words
        sequence.prompt_tokens += len(words)
        sequence.generated = len(words)


def read_request(
    route: str,
    body: dict[str, Any],
    placeholders: list[Placeholder],
    *,
    max_model_len: int,
    max_num_seqs: int,
) -> RequestInside:
    """What the engine is to do for a body whose media parts refer to ``placeholders``.

    Raises:
        RefusedError: it can never be done.
    """
    parameters = read_parameters(route, body)
    if parameters.n > max_num_seqs:
        raise RefusedError(f"n must be at most {max_num_seqs}, got {parameters.n}", "n")
    try:
        prompts = prompts_of(route, body)
    except ValueError as error:
        raise RefusedError(str(error), "prompt") from error
    request = RequestInside(parameters)
    for prompt in prompts:
        request.prompts.append(_inside(request, prompt, placeholders, max_model_len))
    return request


def _inside(
    request: RequestInside, prompt: Prompt, placeholders: list[Placeholder], max_model_len: int
) -> PromptInside:
    spans: list[Span] = []
    evidence: list[str | bytes] = []
    places: list[int] = []
    expected: list[Placeholder] = []
    tokens = 0
    raw = bytearray()
    for piece in prompt:
        if not isinstance(piece, MediaPart):
            evidence.append(piece.text)
            tokens += piece.tokens
            raw += text_tokens(piece.text.encode(), piece.tokens)
            continue
        item = placeholders[piece.part["item"]]
        rows = rows_of(item.modality, item.metadata)
        spans.append(Span(item.key, tokens + ITEM_TOKENS // 2, rows))
        places.append(len(evidence))
        expected.append(item)
        evidence.append(b"")
        tokens += rows + ITEM_TOKENS
        raw += item_tokens(item.key, rows + ITEM_TOKENS)
    parameters = request.parameters
    _check_length(tokens, parameters.limit or 0, max_model_len)
    answer_tokens, reason = answer_length(len(spans), parameters, max_model_len - tokens)
    sequence = Sequence(
        prompt_tokens=tokens,
        answer_tokens=answer_tokens,
        spans=tuple(spans),
        choices=parameters.n,
        priority=parameters.priority,
    )
    return PromptInside(
        sequence, reason, evidence, places, expected, request, blocks_of(bytes(raw))
    )


def _check_length(tokens: int, limit: int, max_model_len: int) -> None:
    context = f"This model's maximum context length is {max_model_len} tokens. However, "
    if tokens < 1:
        raise RefusedError("The prompt must have at least one token.", "prompt")
    if tokens >= max_model_len:
        raise RefusedError(
            f"{context}your prompt contains {tokens} input tokens, which exceeds this limit even "
            "without any output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
        )
    if tokens + limit > max_model_len:
        raise RefusedError(
            f"{context}you requested {limit} output tokens and your prompt contains {tokens} input "
            "tokens. Please reduce one of them.",
            "max_tokens",
        )
