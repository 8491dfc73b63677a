"""What a prefill worker leaves to decode workers: which requests, and how they get them.

A decode job is the request's own job with a handover, at the place ``decode``. It is published before the job
that it comes from is acknowledged, so one of the two is always in the queue. Whoever prefills the same job
once more, as its acknowledgement was lost, publishes the same message, which the queue drops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from epd_common.bus import Bus
from epd_common.engines import KvHandle
from epd_common.ingest.body import COMPLETIONS
from epd_common.protocol import GenerateJob, Handover, Receipt, subjects


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """Which prompts are handed over. Pure policy.

    Attributes:
        tokens: Prompts of so many tokens or more always are.
        whole: Shorter ones are answered where they are prefilled, so many at once; the rest is handed over.
    """

    tokens: int
    whole: int

    def splits(self, prompt_tokens: int, *, whole_now: int) -> bool:
        return prompt_tokens >= self.tokens or whole_now >= self.whole


def can_be_split(route: str, body: dict[str, Any]) -> bool:
    """Whether the answer to a body needs no more of its prompt than keys and values, and that once.

    Several answers to one prompt would each load it, and of what the prompt itself is worth
    (log-probabilities) nothing is handed over.
    """
    if any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
        return False
    if any(body.get(name) for name in ("use_beam_search", "echo")):
        return False
    if body.get("prompt_logprobs") is not None:
        return False
    prompt = body.get("prompt") if route == COMPLETIONS else None
    return not isinstance(prompt, list) or all(isinstance(token, int) for token in prompt)


class HandingOver:
    """Decides and publishes, for one prefill worker.

    Args:
        decoders: Whether there are decode workers that take jobs.
        lease_s: So long the engine keeps what is handed over.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        policy: SplitPolicy,
        decoders: Callable[[], bool],
        lease_s: float,
        worker: str,
    ) -> None:
        self._bus = bus
        self._policy = policy
        self._decoders = decoders
        self._lease_s = lease_s
        self._worker = worker
        self._whole = 0

    def wanted(self, route: str, body: dict[str, Any], *, prompt_tokens: int, again: bool) -> bool:
        """Whether a request is to be handed over once its prompt is prefilled.

        Args:
            again: Its job was delivered before, so it may be handed over already, and then no other way must
                be gone: what is published a second time is dropped.
        """
        return (
            (again or self._policy.splits(prompt_tokens, whole_now=self._whole))
            and can_be_split(route, body)
            and self._decoders()
        )

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """A request is answered here."""
        self._whole += 1
        try:
            yield
        finally:
            self._whole -= 1

    async def publish(
        self,
        job: GenerateJob,
        handle: KvHandle,
        *,
        metadata: list[dict[str, Any]],
        attempt: int,
        sequence: int,
        lane: str,
        receipt: Receipt,
    ) -> None:
        """Publish the decode job of a job.

        Args:
            metadata: Of each item.
            sequence: The job's number in its stream, and ``lane`` where it was there.

        Raises:
            TooLargeError: the job is so near the bus limit that the handover does not fit.
            BusyError: the queue is full.
            UnavailableError: NATS did not take it, or did not say so.
        """
        handover = Handover(
            worker=self._worker,
            attempt=attempt,
            lease_s=self._lease_s,
            params=handle.params,
            metadata=metadata,
            receipt=receipt,
        )
        await self._bus.store(
            subjects.generate_subject(job.model, lane, subjects.DECODE_PLACE),
            msgspec.structs.replace(job, handover=handover),
            message_id=f"decode-{sequence}",
            traceparent=job.traceparent,
        )
