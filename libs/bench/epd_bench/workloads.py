"""What users ask: a mix of kinds of requests. The same seed gives the same requests, in order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from epd_bench.distributions import Distribution
from epd_bench.errors import BenchError

MAX_EDGE = 10_000


def _check_size(text: str) -> str:
    width, cross, height = text.lower().partition("x")
    if not (cross and width.isdecimal() and height.isdecimal()):
        raise ValueError(f"a size is WIDTHxHEIGHT in pixels, got {text!r}")
    if not all(1 <= int(edge) <= MAX_EDGE for edge in (width, height)):
        raise ValueError(f"the edges of {text!r} must be from 1 to {MAX_EDGE} pixels")
    return text.lower()


Size = Annotated[str, AfterValidator(_check_size)]


def edges(size: Size) -> tuple[int, int]:
    """Width and height of a size such as ``640x480``."""
    width, _, height = size.partition("x")
    return int(width), int(height)


class RequestKind(BaseModel):
    """One kind of requests of a mix.

    Attributes:
        weight: How often it comes, against the others.
        images: Pictures of a request; in a conversation those of its first turn.
        sizes: Of a picture, with weights.
        text_tokens: Of a turn of the user; a token is about four bytes.
        output_tokens: Asked for as ``max_tokens``.
        distinct: Pictures are drawn from so many; by default each is one that nobody has sent.
        turns: Of a conversation: each request sends all turns before it, pictures included.
        conversations: So many go on at the same time.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float = Field(1.0, gt=0)
    images: Distribution = Distribution(fixed=0)
    sizes: dict[Size, Annotated[float, Field(gt=0)]] = Field({"640x640": 1.0}, min_length=1)
    text_tokens: Distribution = Distribution(fixed=100)
    output_tokens: Distribution = Distribution(fixed=100)
    distinct: int | None = Field(None, ge=1)
    turns: int = Field(1, ge=1, le=100)
    conversations: int = Field(16, ge=1)


class Workload(BaseModel):
    """A mix of kinds.

    Attributes:
        about: Where it comes from, and what is assumed.
        users: Requests at a time where no arrivals are asked for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    about: str = ""
    users: int | None = Field(None, ge=1)
    kinds: tuple[RequestKind, ...] = Field(min_length=1)

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """All sizes that its pictures have."""
        return {edges(size) for kind in self.kinds if kind.images.most for size in kind.sizes}


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture by its edges in pixels and its number; equal ones have equal bytes."""

    width: int
    height: int
    number: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One message; ``text_seed`` says which text, of ``text_tokens`` tokens."""

    role: str
    text_seed: str
    text_tokens: int
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a workload; ``kind`` counts the workload's kinds from 0."""

    number: int
    kind: int
    turns: tuple[Turn, ...]
    output_tokens: int

    @property
    def pictures(self) -> list[Picture]:
        return [picture for turn in self.turns for picture in turn.pictures]


def generate(workload: Workload, seed: int) -> Iterator[Request]:
    """The requests of a workload, without an end."""
    rng = random.Random(f"{workload.name}-{seed}")
    fresh = itertools.count()
    sources = [
        _conversations(kind, number, rng, fresh) for number, kind in enumerate(workload.kinds)
    ]
    weights = [kind.weight for kind in workload.kinds]
    for number in itertools.count():
        which = rng.choices(range(len(sources)), weights)[0]
        turns, output_tokens = next(sources[which])
        yield Request(number, which, turns, output_tokens)


def _conversations(
    kind: RequestKind, number: int, rng: random.Random, fresh: Iterator[int]
) -> Iterator[tuple[tuple[Turn, ...], int]]:
    """The requests of a kind: some conversations go on side by side, and new ones follow those that end."""
    known: dict[tuple[Size, int], Picture] = {}
    numbers = itertools.count()
    open_ones: list[list[Turn]] = [[] for _ in range(kind.conversations if kind.turns > 1 else 1)]
    while True:
        place = rng.randrange(len(open_ones))
        turns = open_ones[place]
        pictures = () if turns else _pictures(kind, rng, fresh, known)
        name = f"{number}-{next(numbers)}"
        turns.append(Turn("user", f"u{name}", max(1, kind.text_tokens.draw(rng)), pictures))
        output_tokens = max(1, kind.output_tokens.draw(rng))
        yield tuple(turns), output_tokens
        if len(turns) >= 2 * kind.turns - 1:
            open_ones[place] = []
        else:  # what was really answered is not waited for: requests do not depend on each other
            turns.append(Turn("assistant", f"a{name}", output_tokens))


def _pictures(
    kind: RequestKind,
    rng: random.Random,
    fresh: Iterator[int],
    known: dict[tuple[Size, int], Picture],
) -> tuple[Picture, ...]:
    found = []
    for _ in range(kind.images.draw(rng)):
        size = rng.choices(list(kind.sizes), list(kind.sizes.values()))[0]
        if kind.distinct is None:
            found.append(Picture(*edges(size), next(fresh)))
            continue
        place = (size, rng.randrange(kind.distinct))
        if place not in known:
            known[place] = Picture(*edges(size), next(fresh))
        found.append(known[place])
    return tuple(found)


def read_workload(path: Path) -> Workload:
    """Read a workload from a JSON file.

    Raises:
        BenchError: naming the field and what is wrong with it.
    """
    try:
        return Workload.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BenchError(f"the workload {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']}"
            for problem in error.errors(include_url=False)[:5]
        ]
        raise BenchError(
            f"the workload {path} cannot be used:\n" + "\n".join(lines), code="workload_invalid"
        ) from error
