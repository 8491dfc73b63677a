"""What to do about an item that does not come: the order of rescue. Pure policy.

Another encoder first: the queue gives a job to another one when a worker dies or fails, and an embedding that
was lost is ordered again. Then this worker's own engine, if it has a vision tower. Then an error, for this
request alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

Found = Literal["pending", "lost", "failed", "refused"]
"""An item is on its way; was announced and is in no store; could not be encoded this time; can never be."""


class Step(Enum):
    """What comes next."""

    WAIT = "wait"
    ORDER = "order again"
    ENCODE_HERE = "encode here"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known of one item.

    Attributes:
        orders: Times it was ordered on behalf of this request.
        waited_s: Seconds since its present order was first seen.
        total_s: Seconds since the request began to wait for it.
        encoders: Whether anybody takes encode jobs.
        taken_over: Whether a PD worker encodes it already.
        tried_here: Whether this worker has tried it itself, in vain.
    """

    found: Found
    orders: int
    waited_s: float
    total_s: float
    encoders: bool
    taken_over: bool
    tried_here: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RescuePolicy:
    """The order of rescue.

    Attributes:
        attempts: Times an item is ordered in all on behalf of one request.
        patience_s: Seconds that encoders get before this worker encodes an item itself.
        deadline_s: Seconds an item may take in all.
        encodes_here: Whether this worker may encode.
    """

    attempts: int
    patience_s: float
    deadline_s: float
    encodes_here: bool

    def next(self, now: Situation) -> Step:
        """The next step for an item that is not here yet."""
        if now.found == "refused" or now.total_s >= self.deadline_s:
            return Step.GIVE_UP
        may_encode = self.encodes_here and not now.tried_here
        if now.found == "pending":
            at_work = now.encoders or now.taken_over
            overdue = not at_work or now.waited_s >= self.patience_s
            return Step.ENCODE_HERE if may_encode and overdue else Step.WAIT
        if may_encode and (now.found == "failed" or not now.encoders):
            # The queue had its further encoders try before it said so; and a queue that nobody reads is none.
            return Step.ENCODE_HERE
        if now.orders < self.attempts:
            return Step.ORDER
        return Step.ENCODE_HERE if may_encode else Step.GIVE_UP

    def look_again_s(self, now: Situation) -> float:
        """Seconds until this policy may say something else of an item that is still pending."""
        left = self.deadline_s - now.total_s
        if self.encodes_here and not now.tried_here:
            left = min(left, self.patience_s - now.waited_s)
        return max(left, 0.0)
