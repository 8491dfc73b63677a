"""What a request of a workload needs on average, from a sample: the first guess of a search."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from epd_bench.workloads import Workload
from epd_plan.costs import Costs
from epd_plan.demand import demands
from epd_sim.profiles import Profile

SAMPLE = 1000
"""Requests that are looked at."""

_TOGETHER = 16
"""Sequences that decode in a step, assumed for the share of a step that a token takes."""

SPARE = 0.5
"""Of a gateway that is to be quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Of a request, on average.

    Attributes:
        items: Distinct pictures that were not seen before.
        shown: Pictures, repeated ones included.
        media_bytes: Of the pictures' files, by 0.26 bytes a pixel, as JPEGs of photographs have.
        embedding_bytes: Of new pictures.
        read_bytes: Of all that a PD worker reads.
        encode_s: Of an encoder's device, each picture being a batch of its own.
        engine_s: Of a PD worker's device.
        loop_s: Of a gateway's event loop.
        decode_s: Of cores that decode, at the gateway.
    """

    items: float
    shown: float
    media_bytes: float
    embedding_bytes: float
    read_bytes: float
    answer_tokens: float
    encode_s: float
    engine_s: float
    loop_s: float
    decode_s: float

    def gateways(self, rate: float, cores: int) -> int:
        """Gateway processes for so many requests a second, each with so many cores for pictures."""
        return max(1, math.ceil(rate * max(self.loop_s, self.decode_s / cores) / SPARE))


_JPEG_BYTES_A_PIXEL = 0.26


def needs(workload: Workload, seed: int, profile: Profile, costs: Costs) -> Needs:
    """Look at a workload's requests.

    Raises:
        epd_common.errors.BadRequestError: no model can be shown pictures of such a size.
    """
    seen: set[str] = set()
    encode_s = engine_s = 0.0
    items = shown = pixels = embedding_bytes = read_bytes = answer = 0
    for demand in itertools.islice(demands(workload, seed, profile), SAMPLE):
        for thing in demand.things:
            pixels += thing.pixels
            read_bytes += thing.bytes
            if thing.key not in seen:
                seen.add(thing.key)
                items += 1
                embedding_bytes += thing.bytes
                encode_s += profile.encode_s([thing.rows])
        shown += len(demand.things)
        answer += demand.answer_tokens
        engine_s += profile.prefill_token_s * demand.prompt_tokens * profile.time_scale
        engine_s += demand.answer_tokens * profile.engine_step_s(0, _TOGETHER) / _TOGETHER
    return Needs(
        items=items / SAMPLE,
        shown=shown / SAMPLE,
        media_bytes=_JPEG_BYTES_A_PIXEL * pixels / SAMPLE,
        embedding_bytes=embedding_bytes / SAMPLE,
        read_bytes=read_bytes / SAMPLE,
        answer_tokens=answer / SAMPLE,
        encode_s=encode_s / SAMPLE,
        engine_s=engine_s / SAMPLE,
        loop_s=costs.gateway_s + costs.picture_s * shown / SAMPLE,
        decode_s=costs.pixel_s * pixels / SAMPLE,
    )
