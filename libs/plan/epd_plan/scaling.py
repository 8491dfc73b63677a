"""How large a cluster of this project can be before a part that all share is full. On paper: no simulation.

Each part has a load as a share of what one of it can do. Both follow from unit costs, measured on one
machine (docs/scaling.md), so only their order of magnitude travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from epd_common.protocol.subjects import LANES
from epd_plan.needs import Needs

BUSY = 0.7
"""Share of the workers' time that is used, at the rate that a cluster is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """What one of each part costs or can do. Times are of a core.

    Attributes:
        gateway_frame_s: Of a gateway, for a token that it passes on.
        stream_jobs_per_s: Jobs that one stream takes, hands out and forgets.
        nats_request_s: Of NATS, for a text request, its frames included.
        nats_item_s: More for a picture: its job, its two events.
        pull_s: Of NATS, for a pull that ends without a job.
        delivery_s: Of NATS, for a core message to one subscriber.
        heartbeat_s: Seconds between a worker's records.
        record_s: Of who watches them, for each.
        record_worker_s: More for each worker that is known, as the old ones are looked for each time.
        pull_renewed_s: After so many seconds a loaded worker renews the pull of each lane.
        waiting_pulls: That a lane's consumer holds at most.
        valkey_request_s: Of Valkey, for a text request.
        valkey_item_s: More for a picture: claim, states, sizes.
        valkey_bytes_per_s: That one Valkey moves.
    """

    gateway_frame_s: float = 0.00005
    stream_jobs_per_s: float = 12_000.0
    nats_request_s: float = 0.0004
    nats_item_s: float = 0.00006
    pull_s: float = 0.0000105
    delivery_s: float = 0.0000011
    heartbeat_s: float = 2.0
    record_s: float = 0.000003
    record_worker_s: float = 0.00000002
    pull_renewed_s: float = 0.25
    waiting_pulls: int = 512
    valkey_request_s: float = 0.0001
    valkey_item_s: float = 0.0004
    valkey_bytes_per_s: float = 1e9


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster, and the requests a second that its devices serve."""

    encoders: int
    pds: int
    gateways: int
    rate: float

    @property
    def workers(self) -> int:
        return self.encoders + self.pds


@dataclass(frozen=True, slots=True)
class Part:
    """A part that all workers share.

    Attributes:
        load: Of one of it, as a share of what it can do: above 1 more than one is needed.
        figure: What the load is made of, in words.
        shard: What to do when it is full.
    """

    name: str
    load: float
    figure: str
    shard: str


def cluster_of(encoders: int, pds: int, needs: Needs) -> Cluster:
    """A cluster at the rate at which its busier stage is busy by ``BUSY``."""
    stages = [pds / needs.engine_s]
    if needs.encode_s:
        stages.append(encoders / needs.encode_s)
    rate = BUSY * min(stages)
    return Cluster(encoders, pds, needs.gateways(rate, cores=4), rate)


def parts(cluster: Cluster, needs: Needs, units: Units, *, through_valkey: bool) -> list[Part]:
    """The parts of a cluster, with their loads.

    Args:
        through_valkey: Whether embeddings go to other nodes through Valkey.
    """
    rate, workers = cluster.rate, cluster.workers
    items = rate * needs.items
    frames = rate * needs.answer_tokens
    pulls = workers * len(LANES) / units.pull_renewed_s
    beats = (workers + cluster.gateways) / units.heartbeat_s
    told = beats * (cluster.pds + cluster.gateways)
    media = 2 * rate * needs.media_bytes
    embeddings = rate * (needs.embedding_bytes + needs.read_bytes)
    jobs_s = rate * units.nats_request_s + items * units.nats_item_s
    found = [
        Part(
            "gateway: event loops",
            rate * needs.loop_s + frames * units.gateway_frame_s,
            f"{rate:,.0f} requests/s, {frames:,.0f} tokens/s",
            "more gateways behind any load balancer; they share nothing but NATS and Valkey",
        ),
        Part(
            "gateway: decode of pictures",
            rate * needs.decode_s,
            f"{rate * needs.shown:,.0f} pictures/s",
            "more cores beside the gateways",
        ),
        Part(
            "NATS: stream of generate jobs",
            rate / units.stream_jobs_per_s,
            f"{rate:,.0f} jobs/s",
            "a stream for each so many PD workers, chosen by request id",
        ),
        Part(
            "NATS: stream of encode jobs",
            items / units.stream_jobs_per_s,
            f"{items:,.0f} jobs/s",
            "a stream for each so many encoders, chosen by key",
        ),
        Part(
            "NATS: jobs, events and frames",
            jobs_s,
            f"{jobs_s:,.1f} cores",
            "a cluster of servers; streams of different leaders",
        ),
        Part(
            "NATS: pulls without a job",
            pulls * units.pull_s,
            f"{pulls:,.0f} pulls/s",
            "renew pulls less often the more workers there are",
        ),
        Part(
            "NATS: pulls that wait at a lane",
            max(cluster.encoders, cluster.pds) / units.waiting_pulls,
            f"{max(cluster.encoders, cluster.pds):,} workers",
            "a larger `max_waiting`, or consumers for each so many workers",
        ),
        Part(
            "NATS: heartbeats",
            told * units.delivery_s,
            f"{beats:,.0f} records/s to {cluster.pds + cluster.gateways:,} watchers",
            "PD workers that watch encoders' number alone; slower heartbeats",
        ),
        Part(
            "each PD worker: heartbeats",
            beats * (units.record_s + workers * units.record_worker_s),
            f"{beats:,.0f} records/s",
            "as above; and look for old ones seldom",
        ),
        Part(
            "Valkey: commands",
            rate * units.valkey_request_s + items * units.valkey_item_s,
            f"{rate:,.0f} requests/s, {items:,.0f} new pictures/s",
            "Valkey cluster, by key",
        ),
        Part(
            "Valkey: media",
            media / units.valkey_bytes_per_s,
            f"{media / 1e9:,.2f} GB/s",
            "a media store of its own; Valkey cluster, by digest",
        ),
    ]
    if through_valkey:
        found.append(
            Part(
                "Valkey: embeddings",
                embeddings / units.valkey_bytes_per_s,
                f"{embeddings / 1e9:,.2f} GB/s",
                "arena where encoder and PD share a node, else GPU-direct; no Valkey",
            )
        )
    return found


def full_at(name: str, at: Callable[[int], list[Part]], most: int = 1 << 20) -> int:
    """The smallest number of workers at which one of a part is not enough; ``most`` if there is none.

    Args:
        at: The parts of a cluster of so many workers; their loads grow with it.
    """

    def full(workers: int) -> bool:
        return next(part for part in at(workers) if part.name == name).load > 1

    low, high = 0, 2
    while not full(high):
        low, high = high, high * 2
        if high >= most:
            return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if full(middle) else (middle, high)
    return high


def needed(part: Part) -> int:
    """How many of a part there must be, each loaded by at most ``BUSY``."""
    return max(1, math.ceil(part.load / BUSY))
