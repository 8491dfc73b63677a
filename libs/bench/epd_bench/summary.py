"""What a run's outcomes add up to."""

from __future__ import annotations

from collections import Counter

import msgspec

from epd_bench.client import Outcome
from epd_bench.quantiles import Quantiles, quantiles
from epd_bench.slo import Slo


class Summary(msgspec.Struct, kw_only=True):
    """A run in numbers. Times in seconds, rates by the second.

    Attributes:
        lasted_s: From the first request to the end of the last answer.
        failures: How many, by what happened.
        itl: Between reads with tokens, of all answers together.
        slo_share: Of all requests that were sent, those that kept the SLO.
        without_usage: Answers whose tokens were counted by events, as the server told no usage.
    """

    sent: int
    answered: int
    failures: dict[str, int]
    lasted_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft: Quantiles
    tpot: Quantiles
    itl: Quantiles
    e2e: Quantiles
    sent_bytes: int
    received_bytes: int
    output_tokens: int
    images: int
    distinct_images: int
    slo: str
    slo_share: float
    without_usage: int


def keeps(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request was answered within the SLO's bounds."""
    if outcome.failure:
        return False
    tpot_s = outcome.tpot_s if outcome.tpot_s >= 0 else None
    return slo.keeps(outcome.images, outcome.ttft_s, tpot_s)


def summarise(
    outcomes: list[Outcome], *, lasted_s: float, distinct_images: int, slo: Slo
) -> Summary:
    """The summary of a run that has ended."""
    good = [outcome for outcome in outcomes if not outcome.failure]
    tokens = sum(outcome.output_tokens for outcome in good)
    seconds = max(lasted_s, 1e-9)
    return Summary(
        sent=len(outcomes),
        answered=len(good),
        failures=dict(Counter(o.failure for o in outcomes if o.failure).most_common()),
        lasted_s=lasted_s,
        requests_per_s=len(good) / seconds,
        output_tokens_per_s=tokens / seconds,
        ttft=quantiles(outcome.ttft_s for outcome in good),
        tpot=quantiles(outcome.tpot_s for outcome in good if outcome.tpot_s >= 0),
        itl=quantiles(gap for outcome in good for gap in outcome.gaps_s),
        e2e=quantiles(outcome.e2e_s for outcome in good),
        sent_bytes=sum(outcome.sent_bytes for outcome in outcomes),
        received_bytes=sum(outcome.received_bytes for outcome in outcomes),
        output_tokens=tokens,
        images=sum(outcome.images for outcome in outcomes),
        distinct_images=distinct_images,
        slo=slo.text,
        slo_share=sum(keeps(outcome, slo) for outcome in outcomes) / max(1, len(outcomes)),
        without_usage=sum(not outcome.usage for outcome in good),
    )
