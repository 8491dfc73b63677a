"""What an answer must keep to count: bounds on times, and the share of requests that must keep them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from epd_bench.errors import BenchError

_BOUND = re.compile(r"([0-9.]+)(?:\+([0-9.]+)\*images)?")

DEFAULT = "ttft=1+0.25*images,tpot=0.1,share=0.99"
PRESETS = {"vllm-blog": "ttft=20,tpot=0.1,share=0.99", "default": DEFAULT}
"""``vllm-blog``: the bounds of vLLM's blog of 2025-12-15 (P99 TTFT 20 s, P99 TPOT 100 ms); here
the same request must keep both."""


@dataclass(frozen=True, slots=True)
class Bound:
    """So many seconds, and some more for each image of the request."""

    base_s: float
    image_s: float = 0.0

    def of(self, images: int) -> float:
        return self.base_s + self.image_s * images


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds, and the share of requests (above 0, at most 1) that must keep them; failures keep none."""

    ttft: Bound
    tpot: Bound
    share: float
    text: str

    def keeps(self, images: int, ttft_s: float, tpot_s: float | None) -> bool:
        """Whether a request that succeeded keeps the bounds; without a second token it has no ``tpot_s``."""
        if ttft_s > self.ttft.of(images):
            return False
        return tpot_s is None or tpot_s <= self.tpot.of(images)

    def allowed(self, requests: int) -> int:
        """How many of so many requests may break the bounds."""
        return int((1.0 - self.share) * requests + 1e-9)

    def scaled(self, factor: float) -> Slo:
        """The same with all times multiplied."""
        ttft, tpot = (
            Bound(bound.base_s * factor, bound.image_s * factor) for bound in (self.ttft, self.tpot)
        )
        text = self.text if factor == 1 else f"({self.text}) x {factor:g}"
        return Slo(ttft, tpot, self.share, text)


def parse_slo(text: str) -> Slo:
    """Read ``ttft=1+0.25*images,tpot=0.1,share=0.99``, or the name of a preset. Seconds.

    Raises:
        BenchError: saying what is wrong with it.
    """
    spec = PRESETS.get(text, text)
    parts: dict[str, str] = {}
    for part in spec.replace(" ", "").split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in ("ttft", "tpot", "share"):
            raise _wrong(text, f"{part!r} is none of ttft=..., tpot=... and share=...")
        if name in parts:
            raise _wrong(text, f"{name} is there twice")
        parts[name] = value
    if missing := {"ttft", "tpot"} - parts.keys():
        raise _wrong(text, f"{' and '.join(sorted(missing))} missing")
    try:
        share = float(parts.get("share", "0.99"))
    except ValueError:
        raise _wrong(text, f"share={parts['share']} is no number") from None
    if not 0 < share <= 1:
        raise _wrong(text, f"share={share:g} must be above 0 and at most 1")
    return Slo(_bound(text, "ttft", parts), _bound(text, "tpot", parts), share, spec)


def _bound(text: str, name: str, parts: dict[str, str]) -> Bound:
    match = _BOUND.fullmatch(parts[name])
    try:
        if match is None:
            raise ValueError
        bound = Bound(float(match[1]), float(match[2] or 0))
    except ValueError:
        raise _wrong(
            text, f"{name}={parts[name]} must be SECONDS or SECONDS+SECONDS*images"
        ) from None
    if bound.base_s <= 0:
        raise _wrong(text, f"{name}={parts[name]} must be above 0")
    return bound


def _wrong(text: str, reason: str) -> BenchError:
    return BenchError(
        f"the SLO {text!r} cannot be used: {reason}. Write it like {DEFAULT}, or name one of "
        f"{', '.join(PRESETS)}",
        code="slo_invalid",
    )
