"""What the ways between the engines cost: seconds of a core, of a broker, of a link."""

from __future__ import annotations

from dataclasses import dataclass

from epd_common.errors import EpdError


class UnknownLinkError(EpdError):
    """There is no link of that name."""

    default_code = "link_unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of one process or message each. The defaults were measured on a 2-core x86-64 machine
    (docs/scaling.md).

    Attributes:
        gateway_s: Seconds of a gateway's core for a request, without its pictures.
        picture_s: More for each picture: base64, digest, store.
        pixel_s: More for each pixel that is decoded, in the gateway and, where it decodes, in the encoder.
        pd_s: Seconds of a PD worker's core for a request.
        encode_job_s: Seconds of an encoder's core for a picture, besides its decode.
        encode_race_s: Up to so much more that takes, evenly at random: pictures that an encoder took one
            after the other reach its engine in any order.
        message_s: Seconds a message takes from one process through NATS to another.
        nats_s: Seconds that NATS works on a message of a stream; nothing else is done meanwhile there.
    """

    gateway_s: float = 0.001
    picture_s: float = 0.001
    pixel_s: float = 8e-9
    pd_s: float = 0.0008
    encode_job_s: float = 0.002
    encode_race_s: float = 0.008
    message_s: float = 0.0004
    nats_s: float = 1 / 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way of an embedding from its encoder to a PD worker.

    Attributes:
        write_bytes_per_s: Of the encoder, its checksum included.
        read_bytes_per_s: Of the PD worker, likewise.
        shared: All go through one server, such as Valkey.
        latency_s: Of each way.
    """

    name: str
    write_bytes_per_s: float
    read_bytes_per_s: float
    shared: bool = False
    latency_s: float = 0.0


# Measured on the machine above: tmpfs takes 2.3 GB/s, xxh3 17 GB/s; Valkey gives 1 GB/s.
# Assumed: a read is a map and a checksum of what is in no cache; RDMA at 80 % of 200 Gbit/s.
LINKS = {
    link.name: link
    for link in (
        Link(name="arena", write_bytes_per_s=2e9, read_bytes_per_s=6e9),
        Link(
            name="valkey", write_bytes_per_s=1e9, read_bytes_per_s=1e9, shared=True, latency_s=2e-4
        ),
        Link(name="rdma", write_bytes_per_s=20e9, read_bytes_per_s=20e9, latency_s=2e-5),
    )
}


def link_named(name: str) -> Link:
    """A link by its name.

    Raises:
        UnknownLinkError: naming those that there are.
    """
    try:
        return LINKS[name]
    except KeyError:
        raise UnknownLinkError(
            f"there is no link {name!r}; these are: {', '.join(LINKS)}"
        ) from None
