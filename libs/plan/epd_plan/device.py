"""A device in simulated time, and the two that compute on it: a tower, and a language model's engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from epd_plan.events import Event, Events
from epd_sim.batching import next_batch
from epd_sim.profiles import Profile
from epd_sim.scheduler import Scheduler, Sequence, Step


class User(Protocol):
    """Computes on a device."""

    def begin(self) -> float | None:
        """Begin what is to be computed next; its seconds, or None if there is nothing."""

    def rest_s(self, since_s: float) -> float | None:
        """What was begun so long ago is to end as soon as it can: in so many seconds; None if it ends as it
        was to."""

    def end(self) -> None:
        """What was begun is computed."""


class Device:
    """Computes one thing after another, in the order in which they were asked for.

    Args:
        slow_factor: Everything takes so many times as long.
    """

    def __init__(self, events: Events, *, slow_factor: float = 1.0) -> None:
        self._events = events
        self._slow_factor = slow_factor
        self._asked: deque[User] = deque()
        self._user: User | None = None
        self._began = 0.0
        self._end: Event | None = None
        self.busy_s = 0.0

    def ask(self, user: User) -> None:
        """Have something computed, once the device is free; what can end sooner for that does."""
        if user not in self._asked:
            self._asked.append(user)
        if self._user is None:
            self._next()
        else:
            self._hurry(self._user)

    def _hurry(self, user: User) -> None:
        if self._end is None:
            return
        rest_s = user.rest_s((self._events.now - self._began) / self._slow_factor)
        if rest_s is not None:
            self._end.cancel()
            self._end = self._events.after(rest_s * self._slow_factor, self._done)

    def _next(self) -> None:
        while self._asked and self._user is None:
            user = self._asked.popleft()
            seconds = user.begin()
            if seconds is not None:
                self._user, self._began = user, self._events.now
                self._end = self._events.after(seconds * self._slow_factor, self._done)

    def _done(self) -> None:
        user, self._end = self._user, None
        assert user is not None
        self.busy_s += self._events.now - self._began
        user.end()  # who asks meanwhile is put in line
        self._user = None
        self._next()


class Tower:
    """Encodes what waits as a batch, as ``epd_sim.tower`` does."""

    def __init__(self, device: Device, profile: Profile) -> None:
        self._device = device
        self._profile = profile
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._batch: list[tuple[int, Callable[[], None]]] = []

    def encode(self, rows: int, encoded: Callable[[], None]) -> None:
        """Encode an item of so many rows, and tell when it is."""
        self._waiting.append((rows, encoded))
        if not self._batch:
            self._device.ask(self)

    def begin(self) -> float | None:
        self._batch = next_batch(self._waiting, self._profile.encode_batch, lambda item: True)
        return self._profile.encode_s([rows for rows, _ in self._batch]) if self._batch else None

    def rest_s(self, since_s: float) -> float | None:
        return None

    def end(self) -> None:
        batch, self._batch = self._batch, []
        for _, encoded in batch:
            encoded()
        if self._waiting:
            self._device.ask(self)


class Engine:
    """Prefills and decodes, as ``epd_sim.pd_engine`` does. Steps that are alike are one event.

    Args:
        is_here: Whether the embedding of a key is there.
        first: Is told of a sequence with its first token.
        last: Is told of one with its last.
    """

    def __init__(
        self,
        device: Device,
        profile: Profile,
        *,
        max_num_seqs: int,
        is_here: Callable[[str], bool],
        first: Callable[[Sequence], None],
        last: Callable[[Sequence], None],
    ) -> None:
        self._device = device
        self._profile = profile
        self._scheduler = Scheduler(max_num_seqs=max_num_seqs, budget=profile.prefill_budget)
        self._is_here = is_here
        self._first = first
        self._last = last
        self._step = Step((), ())
        self._step_s = 0.0
        self._steps = 0

    def add(self, sequence: Sequence) -> None:
        """Answer a sequence."""
        self._scheduler.add(sequence)
        self._device.ask(self)

    def wake(self) -> None:
        """An embedding has come."""
        self._device.ask(self)

    def begin(self) -> float | None:
        step = self._step = self._scheduler.schedule(self._is_here)
        if step.empty:
            return None
        self._steps = 1
        if not step.prefill:
            # Nothing changes until the first of them ends, or until something comes from outside.
            self._steps = min(each.answer_tokens - each.generated for each in step.decode)
        self._step_s = self._profile.engine_step_s(step.prefill_tokens, step.decoding)
        return self._step_s * self._steps

    def rest_s(self, since_s: float) -> float | None:
        if self._steps == 1 or not self._step_s:
            return None
        begun = min(self._steps, int(since_s / self._step_s) + 1)
        if begun == self._steps:
            return None
        self._steps = begun
        return max(0.0, begun * self._step_s - since_s)

    def end(self) -> None:
        step = self._step
        for sequence in step.decode:
            sequence.generated += self._steps - 1
        for sequence in self._scheduler.advance(step):
            if sequence.generated == 1:
                self._first(sequence)
            if sequence.ended:
                self._last(sequence)
        self._device.ask(self)
