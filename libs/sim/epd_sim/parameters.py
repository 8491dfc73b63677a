"""What a body asks for: how long an answer, how many, in which form. Other fields have no effect here."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from epd_common.ingest.body import COMPLETIONS, RESPONSES

COMPLETION_TOKENS = 16
"""Tokens of a completion that names no limit, as in OpenAI's API."""


class RefusedError(Exception):
    """The request can never be answered as it is; ``param`` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False


class Parameters(BaseModel):
    """The fields that a simulated engine looks at, with the bounds that vLLM has for them."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_output_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    n: int = Field(1, ge=1)
    priority: int = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)

    @property
    def limit(self) -> int | None:
        """Tokens of an answer, at most, where the request says so."""
        return self.max_output_tokens or self.max_completion_tokens or self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


_UNKNOWN_TO_RESPONSES = (
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "stream_options",
)


def read_parameters(route: str, body: dict[str, Any]) -> Parameters:
    """The parameters of a body.

    Raises:
        RefusedError: one of them has a wrong type or value.
    """
    unknown = _UNKNOWN_TO_RESPONSES if route == RESPONSES else ("max_output_tokens",)
    given = {n: value for n, value in body.items() if value is not None and n not in unknown}
    try:
        parameters = Parameters.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
        param = ".".join(map(str, problem["loc"]))
        raise RefusedError(f"{param}: {problem['msg']}, got {problem['input']!r}", param) from error
    if parameters.stream_options is not None and not parameters.stream:
        raise RefusedError(
            "Stream options can only be defined when `stream=True`.", "stream_options"
        )
    if parameters.limit is None and route == COMPLETIONS:
        return parameters.model_copy(update={"max_tokens": COMPLETION_TOKENS})
    return parameters
