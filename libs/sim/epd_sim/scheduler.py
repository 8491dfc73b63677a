"""Who gets the next step of a simulated engine: continuous batching with chunked prefill, as vLLM's.

Pure policy, no time and no I/O:

* Every running sequence that is past its prompt decodes a token, so that no prompt holds up an answer.
* The rest of the step's budget goes to prompts, by priority and then by arrival, each up to its first item
  that is not there.
* A waiting sequence starts when a slot is free and it can prefill something. One that could not is passed
  over, so it takes no slot from others; one that needs more slots than are free is not, so that it gets them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """The place of an item in a prompt, in tokens."""

    key: str
    offset: int
    tokens: int


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the answer that grows behind it.

    Attributes:
        prompt_tokens: 1 or more.
        spans: Of its items, in their order.
        answer_tokens: Tokens of the whole answer, 1 or more.
        choices: Answers that are decoded side by side, each in a slot of its own.
        priority: Lower ones are served first, as in vLLM.
        computed: Tokens of the prompt that are prefilled.
        cached: Of these those that were there before.
        generated: Tokens of the answer that are there.
    """

    prompt_tokens: int
    answer_tokens: int
    spans: tuple[Span, ...] = ()
    choices: int = 1
    priority: int = 0
    computed: int = 0
    cached: int = 0
    generated: int = 0
    arrival: int = field(default=0, init=False)

    @property
    def prefilled(self) -> bool:
        return self.computed == self.prompt_tokens

    @property
    def ended(self) -> bool:
        return self.generated == self.answer_tokens

    def open_tokens(self, is_here: Callable[[str], bool]) -> int:
        """Tokens that can be prefilled now: up to the first item that is not there."""
        for span in self.spans:
            if span.offset + span.tokens > self.computed and not is_here(span.key):
                return max(0, span.offset - self.computed)
        return self.prompt_tokens - self.computed

    def spans_begun(self, tokens: int) -> tuple[int, ...]:
        """Numbers of the items that begin within the next ``tokens`` of the prompt."""
        end = self.computed + tokens
        return tuple(n for n, span in enumerate(self.spans) if self.computed <= span.offset < end)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes: so many tokens of some prompts, and one more token of some answers."""

    prefill: tuple[tuple[Sequence, int], ...]
    decode: tuple[Sequence, ...]

    @property
    def prefill_tokens(self) -> int:
        return sum(tokens for _, tokens in self.prefill)

    @property
    def decoding(self) -> int:
        """Sequences that decode, each choice being one."""
        return sum(sequence.choices for sequence in self.decode)

    @property
    def empty(self) -> bool:
        return not self.prefill and not self.decode


class Scheduler:
    """The sequences of an engine.

    Args:
        max_num_seqs: Slots.
        budget: Tokens of one step, prefilled and decoded together.
        held: Tokens of a sequence's beginning that need not be prefilled.
    """

    def __init__(
        self, *, max_num_seqs: int, budget: int, held: Callable[[Sequence], int] = lambda _: 0
    ) -> None:
        self._held = held
        self._max_num_seqs = max_num_seqs
        self._budget = budget
        self._numbers = itertools.count()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Both in the order in which they are served."""

    def add(self, sequence: Sequence) -> None:
        """Take a sequence, whose ``choices`` are not more than the slots."""
        sequence.arrival = next(self._numbers)
        bisect.insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """It has ended, or is not wanted any more."""
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)

    def schedule(self, is_here: Callable[[str], bool]) -> Step:
        """The next step; empty where nothing can be computed now.

        Args:
            is_here: Whether the embedding of a key is there.
        """
        budget = self._budget
        decode: list[Sequence] = []
        for sequence in self.running:
            if sequence.prefilled and sequence.choices <= budget:
                decode.append(sequence)
                budget -= sequence.choices
        prefill: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            if tokens := min(sequence.open_tokens(is_here), budget):
                prefill.append((sequence, tokens))
                budget -= tokens
        free = self._max_num_seqs - sum(sequence.choices for sequence in self.running)
        for sequence in list(self.waiting):
            if budget == 0 or sequence.choices > free:
                break
            held = min(self._held(sequence), sequence.prompt_tokens - 1)
            if held > sequence.computed:  # of one that was loaded more is there already
                sequence.cached = sequence.computed = held
            if tokens := min(sequence.open_tokens(is_here), budget):
                self.waiting.remove(sequence)
                bisect.insort(self.running, sequence, key=_order)
                prefill.append((sequence, tokens))
                budget -= tokens
                free -= sequence.choices
        return Step(tuple(prefill), tuple(decode))

    def advance(self, step: Step) -> list[Sequence]:
        """A step was computed; the sequences whose answers grew. The last token of a prompt gives the first
        one of its answer. Sequences that were removed meanwhile stay as they are."""
        grown = []
        for sequence, tokens in step.prefill:
            sequence.computed += tokens
            if sequence.prefilled:
                grown.append(sequence)
        grown += step.decode
        grown = [sequence for sequence in grown if sequence in self.running]
        for sequence in grown:
            sequence.generated += 1
            if sequence.ended:
                self.running.remove(sequence)
        return grown


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival
