"""Who can be read from: one record a publishing process, in Valkey.

What NIXL needs of a peer is not in the events, on purpose: NIXL trusts it, and may crash on what was made up,
while events and locators are only looked at. So only who may write these records can say it.
"""

from __future__ import annotations

import msgspec
import xxhash
from redis.asyncio import Redis

from epd_common.store.nixl.errors import NotReadError
from epd_common.store.nixl.memory import MemoryKind, Span
from epd_common.store.redis_client import as_bytes, redis_errors

PREFIX = "epd:v1:nixl:"
TTL_S = 30
EVERY_S = 5.0

_SUM_BYTES = 8
_MOST_BYTES = 64 * 1024


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A process and its region: ``size`` bytes from ``address`` on, of memory ``kind`` on ``device``.

    ``metadata`` is NIXL's; ``compat`` must be the reader's own.
    """

    agent: str
    metadata: bytes
    address: int
    size: int
    kind: MemoryKind
    device: int
    compat: str

    @property
    def span(self) -> Span:
        return Span(self.address, self.size, self.kind, self.device)


def pack_peer(peer: Peer) -> bytes:
    body = msgspec.msgpack.encode(peer)
    return xxhash.xxh3_64_digest(body) + body


def unpack_peer(data: bytes) -> Peer:
    """Read a record.

    Raises:
        NotReadError: it is damaged, or none.
    """
    body = data[_SUM_BYTES:]
    if len(data) > _MOST_BYTES or xxhash.xxh3_64_digest(body) != data[:_SUM_BYTES]:
        raise NotReadError("refused", "a peer's record is damaged")
    try:
        return msgspec.msgpack.decode(body, type=Peer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotReadError("refused", f"a peer's record is none: {error}") from error


class Peers:
    """The records. They go by themselves when their process does not renew them."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def announce(self, peer: Peer) -> None:
        with redis_errors():
            await self._redis.set(PREFIX + peer.agent, pack_peer(peer), ex=TTL_S)

    async def leave(self, agent: str) -> None:
        with redis_errors():
            await self._redis.delete(PREFIX + agent)

    async def find(self, agent: str) -> Peer:
        """What is known of a process.

        Raises:
            NotReadError: nothing, or nothing that can be true.
        """
        with redis_errors():
            found = await self._redis.get(PREFIX + agent)
        if found is None:
            raise NotReadError("unknown", f"nothing is known of peer {agent}")
        peer = unpack_peer(as_bytes(found))
        if peer.agent != agent or peer.size < 1 or peer.address < 1 or peer.device < 0:
            raise NotReadError("refused", f"the record of peer {agent} cannot be true")
        return peer
