"""A simulated encoder: takes whatever waits as a batch, and writes embeddings that name their media."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from epd_common.changes import Changes
from epd_common.engines import StagedEmbedding
from epd_common.store.embedding import EmbeddingHeader
from epd_common.tasks import whole
from epd_sim.batching import next_batch
from epd_sim.device import Device
from epd_sim.embedding import DTYPE, NOT_A_NUMBER, signature, write_embedding
from epd_sim.faults import EngineDiedError, FaultPlan, Faults
from epd_sim.profiles import Profile
from epd_sim.sizing import Size


@dataclass(slots=True, eq=False)
class _Waiting:
    rows: int
    encoded: asyncio.Future[int] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The number of the encode, counted from 1."""


class Tower:
    """Encodes items on a device.

    Args:
        fingerprint: Of the model.
        staging: The arena's staging folder of this worker.
        device: Computes one batch, or one step of the language model, at a time.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        fingerprint: str,
        staging: Path,
        device: Device,
        plan: FaultPlan,
    ) -> None:
        self._profile = profile
        self._fingerprint = fingerprint
        self._staging = staging
        self._device = device
        self._faults = Faults(plan)
        self._waiting: deque[_Waiting] = deque()
        self._batch: list[_Waiting] = []
        self._changes = Changes()
        self._dead = False
        self.batches: Counter[int] = Counter()
        """How often it took how many items at once."""

    @property
    def owes(self) -> bool:
        """Whether anything is in a batch, or waits for one."""
        return bool(self._batch or self._waiting)

    async def encode(self, key: str, data: bytes, size: Size) -> StagedEmbedding:
        """Encode one item.

        Raises:
            EngineDiedError: the tower died before it was done.
            epd_common.store.embedding.IntegrityError: it gave values that are not finite.
            epd_common.store.ArenaFullError: it was encoded, and there is no room for it.
        """
        number = await self._compute(size.rows)
        header = EmbeddingHeader(
            key=key,
            rows=size.rows + self._faults.gives_wrong_rows(number),
            width=self._profile.width,
            dtype=DTYPE,
            fingerprint=self._fingerprint,
            metadata=size.metadata,
        )
        values = NOT_A_NUMBER if self._faults.gives_nan(number) else signature(data)
        writing = asyncio.ensure_future(
            asyncio.to_thread(write_embedding, self._staging, header, values)
        )
        try:
            path, checksum = await whole(writing)
        except asyncio.CancelledError:  # nobody will take what the thread wrote
            if writing.exception() is None:
                writing.result()[0].unlink(missing_ok=True)
            raise
        return StagedEmbedding(path, msgspec.structs.replace(header, checksum=checksum))

    async def run(self) -> None:
        """Encode what waits, batch after batch.

        Raises:
            EngineDiedError: as planned.
        """
        while True:
            seen = self._changes.count
            batch = self._batch = self._take()
            if not batch:
                await self._changes.since(seen)
                continue
            self.batches[len(batch)] += 1
            numbers = []
            for _ in batch:
                await self._faults.begin()
                numbers.append(self._faults.count)
            await self._device.compute(self._profile.encode_s([item.rows for item in batch]))
            for item, number in zip(batch, numbers, strict=True):
                if not item.encoded.done():
                    item.encoded.set_result(number)

    def die(self) -> None:
        """Who waits is told, and who comes."""
        self._dead = True
        for item in (*self._batch, *self._waiting):
            if not item.encoded.done():
                item.encoded.set_exception(EngineDiedError("the engine died"))

    async def _compute(self, rows: int) -> int:
        """Wait until an item was in a batch; the number of its encode."""
        if self._dead:
            raise EngineDiedError("the engine is dead")
        item = _Waiting(rows)
        self._waiting.append(item)
        self._changes.note()
        return await item.encoded

    def _take(self) -> list[_Waiting]:
        """The next batch. Those whose request has gone away are left out."""
        return next_batch(
            self._waiting, self._profile.encode_batch, lambda item: not item.encoded.done()
        )
