"""The worker registry: who is there, read from the KV bucket ``epd_workers``.

A worker writes its record at every heartbeat. A reader watches the bucket and judges age by its own
monotonic clock from the moment a beat arrived, since a bucket's expiry sends no event and clocks differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

import nats.errors
import nats.js.errors
from nats.js.kv import KeyValue

from epd_common.bus.connection import Bus
from epd_common.bus.streams import once_led
from epd_common.changes import Changes
from epd_common.errors import UnavailableError
from epd_common.protocol import subjects
from epd_common.protocol.codec import ProtocolError, decode, encode
from epd_common.protocol.workers import WorkerRecord
from epd_common.tasks import end

logger = logging.getLogger(__name__)

FORGOTTEN_S = 200.0
"""So long after its last beat a worker is forgotten, whatever its record says: over three times the longest
time between beats."""

LOOK_S = 0.5
"""Seconds between looks at whether the connection is still the one that the watch was made on."""

BLIND_S = 20.0
"""While nobody at all is heard of, as when a cluster of NATS servers lost the one that led the bucket, nobody
is held for dead for so long: it is the bucket that is silent."""


class _Ear:
    """When the last beat of anybody was heard, by the monotonic clock."""

    def __init__(self) -> None:
        self.heard = time.monotonic()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard


class WorkerView:
    """A worker's latest record and when its last new beat was seen here."""

    __slots__ = ("_ear", "record", "seen")

    def __init__(self, record: WorkerRecord, ear: _Ear | None = None) -> None:
        self.record = record
        self.seen = time.monotonic()
        self._ear = ear or _Ear()

    @property
    def alive(self) -> bool:
        age_s = time.monotonic() - self.seen
        silent_s = min(self._ear.silent_s, BLIND_S)
        return age_s - silent_s < self.record.ttl_s and age_s < FORGOTTEN_S

    @property
    def ready(self) -> bool:
        return self.alive and self.record.state == "ready"


class Registry:
    """A live copy of the bucket. Use as an async context manager."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._workers: dict[str, WorkerView] = {}
        self._ear = _Ear()
        self._task: asyncio.Task[None] | None = None
        self._first_sync = asyncio.Event()
        self._changes = Changes()
        self._closing = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow(), name="registry watch")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._first_sync.wait(), 5)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing = True  # a cancel can be lost, see `end`
        if self._task is not None:
            await end(self._task)

    def workers(self, role: str | None = None, model: str | None = None) -> list[WorkerView]:
        """All workers known, dead ones included, in the order of their names."""
        return [
            view
            for _, view in sorted(self._workers.items())
            if (role is None or view.record.role == role)
            and (model is None or view.record.model == model)
        ]

    def view(self, key: str) -> WorkerView | None:
        """What is known of the worker with this key of the bucket, dead or alive."""
        return self._workers.get(key)

    def ready(self, role: str, model: str) -> list[WorkerRecord]:
        """Records of the workers of a model that take work now."""
        return [view.record for view in self.workers(role, model) if view.ready]

    def answering(self, model: str) -> list[WorkerRecord]:
        """Records of the PD workers of a model that take requests now."""
        return [record for record in self.ready("pd", model) if record.pd_role != "decode"]

    def decoding(self, model: str) -> list[WorkerRecord]:
        """Records of the decode workers of a model, which take requests from prefill workers."""
        return [record for record in self.ready("pd", model) if record.pd_role == "decode"]

    def encoding(self, model: str) -> list[WorkerRecord]:
        """Records of the workers of a model that can encode now, whatever their role."""
        views = self.workers(model=model)
        return [view.record for view in views if view.ready and view.record.encodes != "no"]

    def takes_encodes(self, model: str) -> bool:
        """Whether anybody takes the encode jobs of a model now."""
        return any(record.encodes == "queue" for record in self.encoding(model))

    async def until_served(self, timeout_s: float) -> None:
        """Return when some model is served, or after ``timeout_s``.

        A record that its worker replaces while the bucket is first read can be missing for a moment.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    seen = self._changes.count
                    if self.models():
                        return
                    await self._changes.since(seen)

    def models(self) -> list[str]:
        """Names of the models that at least one ready PD worker serves."""
        return sorted(
            {
                view.record.model
                for view in self.workers("pd")
                if view.ready and view.record.pd_role != "decode"
            }
        )

    async def _follow(self) -> None:
        """Watch the bucket; after an error begin again, as the bucket itself may be new."""
        while True:
            try:
                bucket = await self._bus.js.key_value(subjects.WORKERS_BUCKET)
                await self._watch(bucket)
            except nats.js.errors.BucketNotFoundError:
                self._first_sync.set()  # no service has declared it yet: nobody is there
            except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
                logger.warning(
                    "worker registry: %s; watching again", str(error) or type(error).__name__
                )
            if self._closing:
                return
            await asyncio.sleep(0.5)

    async def _watch(self, bucket: KeyValue) -> None:
        connection = self._bus.reconnects
        watcher = await bucket.watchall()
        since = time.monotonic()
        try:
            # A server that was started again knows nothing of the watch, and sends nothing. Nor does a
            # cluster's server where it was another one that kept the watch, and is gone.
            while self._bus.reconnects == connection and not self._closing:
                try:
                    entry = await watcher.updates(timeout=LOOK_S)
                except TimeoutError:
                    if time.monotonic() - since > self._patience_s:
                        return
                    continue
                since = time.monotonic()
                if entry is None:  # all that was there has been read
                    self._first_sync.set()
                elif entry.operation in ("DEL", "PURGE"):
                    self._workers.pop(entry.key, None)
                else:
                    self._note(entry.key, entry.value or b"")
        finally:
            with contextlib.suppress(nats.errors.Error):
                await watcher.stop()

    @property
    def _patience_s(self) -> float:
        """Seconds after which a watch is made anew that shows nothing, though somebody beats."""
        ttls = [view.record.ttl_s for view in self._workers.values()]
        return max(2 * LOOK_S, min(ttls, default=60.0))

    def _note(self, key: str, value: bytes) -> None:
        try:
            record = decode(value, WorkerRecord)
        except ProtocolError as error:
            logger.warning("worker registry: record %s is unreadable: %s", key, error)
            return
        if key != subjects.worker_key(record.role, record.worker):
            # Who may write records may do so under its own role alone; inside it could claim any.
            logger.warning("worker registry: record %s claims to be another's; ignored", key)
            return
        view = WorkerView(record, self._ear)
        before = self._workers.get(key)
        if before is not None and (before.record.beat, before.record.pid) == (
            record.beat,
            record.pid,
        ):
            view.seen = before.seen  # read again, not beaten again
        else:
            self._ear.heard = view.seen
        self._workers[key] = view
        self._changes.note()
        oldest = time.monotonic() - FORGOTTEN_S
        for old in [k for k, v in self._workers.items() if v.seen < oldest]:
            del self._workers[old]


@contextlib.asynccontextmanager
async def announce(
    bus: Bus, snapshot: Callable[[int], WorkerRecord], *, every_s: float
) -> AsyncIterator[Callable[[], None]]:
    """Keep a worker's record in the bucket while the context is open; take it out at the end.

    Args:
        snapshot: Gives the record for a beat number.

    Yields:
        A function that has the record written again at once, for a change of state.
    """
    bucket = await once_led(lambda: bus.js.key_value(subjects.WORKERS_BUCKET))
    first = snapshot(0)
    key = subjects.worker_key(first.role, first.worker)
    changed = asyncio.Event()
    closing = asyncio.Event()

    async def beat() -> None:
        number = 0
        while True:
            changed.clear()
            try:
                await bucket.put(key, encode(snapshot(number)))
            except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
                logger.warning("heartbeat failed: %s", str(error) or type(error).__name__)
            if closing.is_set():
                return
            number += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await changed.wait()

    task = asyncio.create_task(beat(), name="heartbeat")
    try:
        yield changed.set
    finally:
        closing.set()
        await end(task)
        with contextlib.suppress(
            nats.errors.Error, nats.js.errors.Error, TimeoutError, UnavailableError
        ):
            await bucket.delete(key)
