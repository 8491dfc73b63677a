"""What vLLM's KV events say of the beginnings of prompts, in the scheduler's process.

vLLM publishes which blocks its prefix cache stores and removes, by hashes that only it can compute. Here it
also knows the requests, to which the service has attached their beginnings (:mod:`epd_vllm.beginnings`), and
in which blocks these end. So nothing of a prompt has to leave the engine, and no port is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from epd_common.kept import Block, BlockWatch
from epd_vllm.beginnings import ends_of
from epd_vllm.kept_pipe import KeptWriter

if TYPE_CHECKING:
    from vllm.config.kv_events import KVEventsConfig
    from vllm.v1.request import Request


class KvEvents(EventPublisher):
    """Stands before the engine's own publisher, which an operator may have set.

    Args:
        pipe: See :mod:`epd_vllm.kept_pipe`.
        block_tokens: Tokens of a block that has a hash.
    """

    def __init__(self, publisher: EventPublisher, pipe: Path, *, block_tokens: int) -> None:
        super().__init__()
        self._publisher = publisher
        self._block_tokens = block_tokens
        writer = KeptWriter(pipe, lambda: self._watch.kept)
        self._watch = BlockWatch(writer.told)
        self._waiting: dict[str, Request] = {}
        """Requests with beginnings that are not prefilled yet."""

    def publish(self, events: EventBatch) -> None:
        for event in events.events:
            if isinstance(event, BlockStored):
                self._watch.stored(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self._watch.removed(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self._watch.cleared()
        self._publisher.publish(events)

    def shutdown(self) -> None:
        self._publisher.shutdown()

    def get_publisher_config(self) -> KVEventsConfig | None:
        return self._publisher.get_publisher_config()

    def came(self, request: Request) -> None:
        """The scheduler has a new request."""
        if ends_of(request):
            self._waiting[request.request_id] = request

    def left(self) -> None:
        """Requests may have ended unfinished."""
        for name in [name for name, request in self._waiting.items() if request.is_finished()]:
            del self._waiting[name]

    def computed(self, names: Sequence[str]) -> None:
        """A step with these requests was computed, and its events were published."""
        for name in names:
            request = self._waiting.get(name)
            if request is None or request.num_computed_tokens < request.num_prompt_tokens:
                continue
            del self._waiting[name]
            self._watch.prefilled(self._blocks(request))

    def _blocks(self, request: Request) -> list[tuple[str, Block]]:
        hashes = request.block_hashes
        counts = ((key, tokens // self._block_tokens) for key, tokens in ends_of(request).items())
        return [
            (key, maybe_convert_block_hash(hashes[count - 1]))
            for key, count in counts
            if 0 < count <= len(hashes)
        ]
