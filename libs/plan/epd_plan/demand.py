"""What a request of a workload asks of a model: tokens, and items with their rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from epd_bench.workloads import Picture, Request, Workload, generate
from epd_common.costs import CHARACTERS_PER_TOKEN, PIXELS_PER_ROW
from epd_sim.profiles import Profile
from epd_sim.prompts import ITEM_TOKENS, MESSAGE_TOKENS, OPENING_TOKENS
from epd_sim.scheduler import Span
from epd_sim.sizing import MERGE, grid_of


@dataclass(frozen=True, slots=True)
class Thing:
    """A distinct item of a request."""

    key: str
    rows: int
    bytes: int
    pixels: int


@dataclass(frozen=True, slots=True)
class Demand:
    """One request.

    Attributes:
        things: Its distinct items, in the order in which they first stand in the prompt.
        spans: Their places in the prompt, one for each time that one is shown.
        text_before: Characters before the first of them.
        estimate: Tokens of the prompt as a PD worker takes them for its urgency.
    """

    number: int
    images: int
    prompt_tokens: int
    answer_tokens: int
    things: tuple[Thing, ...]
    spans: tuple[Span, ...]
    text_before: int
    estimate: int


def demands(workload: Workload, seed: int, profile: Profile) -> Iterator[Demand]:
    """The requests of a workload, as ``epd bench`` with the same seed sends them, without an end.

    Those too long for the model are left out: it refuses them.

    Raises:
        epd_common.errors.BadRequestError: no model can be shown pictures of such a size.
    """
    for request in generate(workload, seed):
        demand = demand_of(request, profile)
        if demand.prompt_tokens < profile.max_model_len:
            yield demand


def demand_of(request: Request, profile: Profile) -> Demand:
    """One request's demand.

    Raises:
        epd_common.errors.BadRequestError: no model can be shown pictures of such a size.
    """
    tokens, text, text_before = 0, 0, 0
    spans: list[Span] = []
    things: dict[int, Thing] = {}
    for turn in request.turns:
        tokens += MESSAGE_TOKENS
        for picture in turn.pictures:
            thing = things.get(picture.number)
            if thing is None:
                thing = things[picture.number] = _thing(picture, profile)
            if not spans:
                text_before = text * CHARACTERS_PER_TOKEN
            spans.append(Span(thing.key, tokens + ITEM_TOKENS // 2, thing.rows))
            tokens += thing.rows + ITEM_TOKENS
        tokens += turn.text_tokens
        text += turn.text_tokens
    tokens += OPENING_TOKENS
    seen = sum(thing.pixels // PIXELS_PER_ROW for thing in things.values())
    return Demand(
        number=request.number,
        images=len(spans),
        prompt_tokens=tokens,
        answer_tokens=max(1, min(request.output_tokens, profile.max_model_len - tokens)),
        things=tuple(things.values()),
        spans=tuple(spans),
        text_before=text_before,
        estimate=text + seen,
    )


def _thing(picture: Picture, profile: Profile) -> Thing:
    rows = _rows(picture.width, picture.height, profile.patch, profile.max_rows)
    pixels = picture.width * picture.height
    return Thing(str(picture.number), rows, 2 * rows * profile.width, pixels)


@functools.cache
def _rows(width: int, height: int, patch: int, max_rows: int) -> int:
    frames, down, across = grid_of(width, height, {}, patch=patch, max_rows=max_rows)
    return frames * down * across // MERGE**2
