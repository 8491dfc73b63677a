"""The workloads that come with the harness, each with its source and what is assumed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from epd_bench.distributions import Distribution, spread
from epd_bench.errors import BenchError
from epd_bench.workloads import RequestKind, Workload, read_workload

AZURE_CAP = 25
"""Pictures of a request at most in ``azure``; in the trace 8 % of the image requests have more."""

# Published (Azure LMM trace of 2025, read off its plots): half of the requests are text alone; of the others
# 66 % carry one picture, 71 % up to 4, 86 % up to 9, 92 % up to 25. Text-only input p50 800, output p50 80.
# Assumed: the sizes of pictures, evenly spread counts within those steps, the tails (p90), the text beside
# pictures, and that what is above 25 pictures is 25, so that a prompt fits into 32,768 tokens.
_AZURE_COUNTS = {1: 0.66} | {n: 0.05 / 3 for n in (2, 3, 4)}
_AZURE_COUNTS |= {n: 0.15 / 5 for n in range(5, 10)}
_AZURE_COUNTS |= {n: 0.06 / 15 for n in range(10, AZURE_CAP)}
_AZURE_COUNTS[AZURE_CAP] = 1.0 - sum(_AZURE_COUNTS.values())
_AZURE_OUTPUT = Distribution(p50=80, p90=400, max=1000)

_AZURE = Workload(
    name="azure",
    about=f"Azure LMM trace 2025, read off its plots; at most {AZURE_CAP} pictures; sizes and tails assumed",
    kinds=(
        RequestKind(
            text_tokens=Distribution(p50=800, p90=5000, max=16000), output_tokens=_AZURE_OUTPUT
        ),
        RequestKind(
            images=Distribution(choices=_AZURE_COUNTS),
            sizes={"512x512": 0.5, "640x640": 0.3, "1024x768": 0.2},
            text_tokens=Distribution(p50=200, p90=1000, max=2000),
            output_tokens=_AZURE_OUTPUT,
        ),
    ),
)

_CHAT = Workload(
    name="chat",
    about="conversations of five turns over one picture: 80 % of the pictures sent are repeated ones, as in "
    "published cache gains",
    kinds=(
        RequestKind(
            images=Distribution(fixed=1),
            sizes={"640x640": 0.5, "1280x720": 0.5},
            text_tokens=Distribution(uniform=(20, 120)),
            output_tokens=Distribution(uniform=(40, 120)),
            turns=5,
        ),
    ),
)

_ONE_PICTURE = Workload(
    name="one-picture",
    about="64 users ask about one and the same picture at once",
    users=64,
    kinds=(
        RequestKind(
            images=Distribution(fixed=1),
            sizes={"1280x720": 1},
            text_tokens=Distribution(fixed=50),
            output_tokens=Distribution(fixed=50),
            distinct=1,
        ),
    ),
)

_TEXT = Workload(
    name="text",
    about="no pictures",
    kinds=(
        RequestKind(
            text_tokens=Distribution(p50=800, p90=2000, max=8000),
            output_tokens=Distribution(fixed=80),
        ),
    ),
)

_IMAGE_LIGHT = Workload(
    name="image-light",
    about="one small picture, much text: where a separate encoder has least to give",
    kinds=(
        RequestKind(
            images=Distribution(fixed=1),
            sizes={"224x224": 1},
            text_tokens=Distribution(fixed=1000),
            output_tokens=Distribution(fixed=128),
        ),
    ),
)

BUILTIN = {
    workload.name: workload for workload in (_AZURE, _CHAT, _ONE_PICTURE, _TEXT, _IMAGE_LIGHT)
}
RANDOM_MM = "random-mm"
NAMES = (RANDOM_MM, *BUILTIN)


@dataclass(frozen=True, slots=True)
class RandomMm:
    """Parameters of ``random-mm``, which go by the dataset of that name in ``vllm bench serve``.

    Attributes:
        images: Of a request, on average.
        sizes: ``WIDTHxHEIGHT`` or ``WIDTHxHEIGHT:WEIGHT``, with commas between them.
        text: Tokens of the text, on average.
        output: Tokens of the answer, on average.
        spread: All three vary evenly by up to this share, from 0 to below 1.
    """

    images: int = 1
    sizes: str = "256x256:0.5,1280x720:0.5"
    text: int = 1024
    output: int = 128
    spread: float = 0.0


def find_workload(name: str, random_mm: RandomMm) -> Workload:
    """A workload by its name, or by the path of its JSON file.

    Raises:
        BenchError: there is none, or it cannot be used.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    if name == RANDOM_MM:
        return _random_mm(random_mm)
    if name.endswith(".json"):
        return read_workload(Path(name))
    raise BenchError(
        f"there is no workload {name!r}; these are: {', '.join(NAMES)}, or the path of a .json file",
        code="workload_unknown",
    )


def _random_mm(options: RandomMm) -> Workload:
    if not 0 <= options.spread < 1:
        raise BenchError(f"--spread must be from 0 to below 1, got {options.spread:g}")
    if options.images < 0 or options.text < 1 or options.output < 1:
        raise BenchError("--images must be 0 or more, --text and --output 1 or more")
    sizes: dict[str, float] = {}
    for part in options.sizes.split(","):
        size, colon, weight = part.strip().partition(":")
        try:
            sizes[size] = float(weight) if colon else 1.0
        except ValueError:
            raise BenchError(f"--sizes: the weight {weight!r} of {size} is no number") from None
    try:
        kind = RequestKind.model_validate(
            {
                "images": spread(options.images, options.spread),
                "sizes": sizes,
                "text_tokens": spread(options.text, options.spread),
                "output_tokens": spread(options.output, options.spread),
            }
        )
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise BenchError(f"--sizes {options.sizes}: {reason}") from error
    return Workload(
        name=RANDOM_MM,
        about=f"{options.images} pictures of {options.sizes}, {options.text} tokens of text, "
        f"{options.output} of output, spread {options.spread:g}",
        kinds=(kind,),
    )
