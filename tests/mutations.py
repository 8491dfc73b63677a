"""Messages made wrong from a seed: bytes turned, cut and doubled, and fields with values of all kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgpack

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    (1 << 31),
    (1 << 53) + 1,
    (1 << 63) - 1,
    -(1 << 63),
    (1 << 64) - 1,
    0.0,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "\0",
    "x" * 5000,
    ">",
    "*",
    "a.b.>",
    "$JS.API.STREAM.DELETE.EPD_ENCODE",
    "epd.v1.dlq.encode",
    "../../etc/passwd",
    "\N{RIGHT-TO-LEFT OVERRIDE}\N{SNOWMAN}",
    b"",
    b"\xff" * 300,
    [],
    {},
    [[[[[[]]]]]],
    {"a": {"b": {"c": [1, 2, 3]}}},
    [0] * 1000,
    msgpack.ExtType(5, b"ext"),
)

Mutation = Callable[[random.Random, bytes], bytes]


def _turn_bits(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.randint(1, 20)) + data[at:]


def _double(rng: random.Random, data: bytes) -> bytes:
    start, end = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:end] + data[start:]


def _nest(rng: random.Random, data: bytes) -> bytes:
    return b"\x91" * rng.choice((10, 1000, 100_000)) + data


def _noise(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.randint(0, 2 * len(data)))


def _field(rng: random.Random, data: bytes) -> bytes:
    """Another value in one field, or without it, or in a map or list below it."""
    message = msgpack.unpackb(data)
    place: Any = message
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        below = place[key]
        if not isinstance(below, dict | list) or not below or rng.random() < 0.5:
            break
        place = below
    if isinstance(place, dict) and rng.random() < 0.15:
        del place[key]
    else:
        place[key] = rng.choice(VALUES)
    packed: bytes = msgpack.packb(message)
    return packed


BYTES: tuple[Mutation, ...] = (_turn_bits, _cut, _insert, _double, _nest, _noise)


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The message, made wrong in one way; half of the time in a field alone."""
    mutation = _field if rng.random() < 0.5 else rng.choice(BYTES)
    return mutation(rng, data)
