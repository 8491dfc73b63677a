"""A system that is to be simulated: how many of what, and how they are set."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from epd_common.protocol.lanes import AGED_WAITS_S
from epd_common.settings import EncodeSettings
from epd_plan.costs import LINKS, Costs, Link
from epd_sim.profiles import Profile

System = Literal["split", "fan-in", "colocated"]

MOST_WORKERS = 128
"""A larger system is simulated by a slice of it, with its part of the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A system.

    Attributes:
        system: ``split`` is this project, ``fan-in`` vLLM's example proxy, ``colocated`` are servers that do
            everything on one device each, behind a router that takes the one with the fewest open requests.
        encoders: Of ``split`` it may have 0: then PD workers encode as well (role ``ec_both``).
        pds: PD workers, or colocated servers.
        gateways: Processes with one event loop each.
        cores: Of a process, for pictures that it decodes.
        encoders_decode: Whether encoders decode pictures, as real ones do.
        slow_factor: Of every encoder: it takes so many times as long as the profile's device.
        slow_first: Of the first encoder alone, besides.
        max_num_seqs: Sequences that an engine runs at once.
        cache_bytes: Embeddings that are kept, of the whole system.
        lane_waits_s, encoder_slots, encode_ahead_s, pd_slots, max_incomplete, prefill_wait_s: As the settings
            of these names.
    """

    system: System = "split"
    profile: Profile
    encoders: int
    pds: int
    gateways: int = 1
    cores: int = 4
    encoders_decode: bool = True
    slow_factor: float = 1.0
    slow_first: float = 1.0
    max_num_seqs: int = 64
    cache_bytes: int = 64 << 30
    costs: Costs = field(default_factory=Costs)
    link: Link = LINKS["arena"]
    lane_waits_s: tuple[float, ...] = AGED_WAITS_S
    encoder_slots: int = EncodeSettings.model_fields["encoder_slots"].default
    encode_ahead_s: float = EncodeSettings.model_fields["encode_ahead_s"].default
    pd_slots: int = 128
    max_incomplete: int = 8
    prefill_wait_s: float = 3.0

    @property
    def workers(self) -> int:
        """Devices."""
        return self.encoders + self.pds


def sliced(shape: Shape, rate: float, most: int = MOST_WORKERS) -> tuple[Shape, float]:
    """A slice of a large system with its part of a rate; small ones as they are.

    What a slice leaves out is that a large system evens out more; what it rounds is a worker of ``most``.
    """
    if shape.workers <= most:
        return shape, rate
    part = most / shape.workers
    pds = max(1, round(shape.pds * part))
    encoders = max(1, most - pds) if shape.encoders else 0
    # Of the two stages the one that lost more by rounding sets the rate.
    kept = [pds / shape.pds] + ([encoders / shape.encoders] if shape.encoders else [])
    gateways = max(1, round(shape.gateways * part))
    small = dataclasses.replace(shape, encoders=encoders, pds=pds, gateways=gateways)
    return small, rate * min(kept)
