"""How a number differs from request to request: written in a workload's JSON, drawn by a seed."""

from __future__ import annotations

import math
import random
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_P90 = 1.2815515655446004
"""The 90th percentile of the standard normal distribution."""


class Distribution(BaseModel):
    """One of: a whole number; ``{"choices": {"1": 0.6, "4": 0.4}}`` (values and weights);
    ``{"uniform": [1, 4]}``; ``{"p50": 800, "p90": 4000, "max": 8000}`` (log-normal, cut at ``max``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fixed: int | None = Field(None, ge=0)
    choices: dict[int, float] | None = None
    uniform: tuple[int, int] | None = None
    p50: float | None = Field(None, gt=0)
    p90: float | None = Field(None, gt=0)
    max: int | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return {"fixed": value}
        if not isinstance(value, dict | Distribution):
            raise ValueError(f"must be a whole number or a distribution, got {value!r}")
        return value

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        kinds = (self.fixed, self.choices, self.uniform, self.p50)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("must have exactly one of fixed, choices, uniform and p50")
        if (self.p50 is None) != (self.p90 is None) or (self.max is not None and self.p50 is None):
            raise ValueError("p50 and p90 belong together, and max to them")
        if self.p50 is not None and self.p90 is not None and self.p90 < self.p50:
            raise ValueError(f"p90 ({self.p90:g}) must not be below p50 ({self.p50:g})")
        if self.choices is not None:
            if not self.choices or min(self.choices.values()) < 0:
                raise ValueError("the weights of choices must be 0 or more")
            if sum(self.choices.values()) <= 0 or min(self.choices) < 0:
                raise ValueError("choices needs values of 0 or more, one with a weight above 0")
        if self.uniform is not None and not 0 <= self.uniform[0] <= self.uniform[1]:
            raise ValueError("uniform must be [LOW, HIGH] with 0 <= LOW <= HIGH")
        return self

    @property
    def most(self) -> int:
        """The largest number that can come; of a log-normal without ``max`` none is known: -1."""
        if self.fixed is not None:
            return self.fixed
        if self.choices is not None:
            return max(value for value, weight in self.choices.items() if weight > 0)
        if self.uniform is not None:
            return self.uniform[1]
        return -1 if self.max is None else self.max

    def draw(self, rng: random.Random) -> int:
        """The next number."""
        if self.fixed is not None:
            return self.fixed
        if self.choices is not None:
            return rng.choices(list(self.choices), list(self.choices.values()))[0]
        if self.uniform is not None:
            return rng.randint(*self.uniform)
        assert self.p50 is not None and self.p90 is not None
        sigma = math.log(self.p90 / self.p50) / _P90
        value = max(1, round(self.p50 * math.exp(sigma * rng.gauss(0.0, 1.0))))
        return value if self.max is None else min(value, self.max)


def spread(mean: int, ratio: float) -> Distribution:
    """Evenly from ``mean`` x (1 - ratio) to ``mean`` x (1 + ratio), as ``--random-range-ratio`` in vLLM."""
    return Distribution(uniform=(math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))))
