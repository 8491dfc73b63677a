"""On which nodes embeddings lie, as far as whoever listens to their events knows. No I/O.

It is a hint: an embedding may be gone meanwhile, or lie where nobody said so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set

from nats.aio.msg import Msg

from epd_common.protocol import EmbeddingEvent, ProtocolError, decode

MOST_EMBEDDINGS = 16_384
"""The latest that were announced; one of 7 MB each would fill 115 GB."""

MOST_NODES = 16
"""Of one embedding."""

_KEY_CHARACTERS = 64


class EmbeddingNodes:
    """Nodes whose arenas have been said to hold an embedding."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[str, frozenset[str]] = OrderedDict()

    def nodes_of(self, key: str) -> Set[str]:
        return self._nodes.get(key, frozenset())

    def take(self, event: EmbeddingEvent) -> None:
        """An encoder said what became of an embedding."""
        nodes = {place.node for place in event.locators if place.store == "arena" and place.node}
        if event.state != "ready" or not nodes or len(event.key) != _KEY_CHARACTERS:
            return
        known = self._nodes.pop(event.key, frozenset())
        both = nodes | known
        self._nodes[event.key] = frozenset(both if len(both) <= MOST_NODES else nodes)
        if len(self._nodes) > MOST_EMBEDDINGS:
            self._nodes.popitem(last=False)

    async def on_message(self, message: Msg) -> None:
        """Handles ``epd.v1.ready.*``."""
        try:
            self.take(decode(message.data, EmbeddingEvent))
        except ProtocolError:
            return  # who waits for it says so
