"""Which PD worker a request is meant for: the one that has its beginning in its prefix cache, or may have.

Workers say what they hold (:mod:`epd_common.held_index`): who holds the longest beginning of a request comes
first, then those on whose nodes its embeddings lie. Where nothing is known, requests that begin alike (turns
of one conversation, questions about one document) are sent to one worker by rendezvous hashing of that
beginning, so that senders agree without talking, and a worker that joins or leaves moves few of them. One
that has more than its share of work is passed over, so that a popular beginning does not wait in one place
while others are idle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import xxhash

from epd_common.beginnings import MIN_TOKENS, Beginning, beginnings_of
from epd_common.costs import work_of
from epd_common.ingest.body import CHAT, CONTENT_FIELDS, RESPONSES
from epd_common.ingest.contents import PROMPT_FIELDS
from epd_common.ingest.parts import text_of
from epd_common.protocol import Item, WorkerRecord
from epd_common.protocol.subjects import ANY_PLACE
from epd_common.rendezvous import ranked

FACTOR = 1.5
"""A worker's work is above its share beyond so many times the mean, and one request more."""

TRIES = 2
"""Workers that are asked, by nearness; where none has room any may have the request."""

MOST_KNOWN = 1024
"""Workers whose placed requests are counted at once."""

Outcome = Literal["held", "nearest", "next", "crowded", "unplaced"]
"""How a request was placed: with a worker that holds what it needs, with the nearest one, with the next one,
with nobody in particular as both had too much work, or as there was no reason."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is known of a worker's work, in requests."""

    worker: str
    backlog: int
    slots: int


def prefix_key(route: str, body: dict[str, Any], items: Sequence[Item]) -> str:
    """A digest of how a prepared body begins, the same for all turns of a conversation; empty: it has none.

    For a chat these are its messages up to the first one of the user, for a response its instructions and
    its first input. Media count by their bytes.

    Args:
        items: Those that the body's ``media_ref`` parts point at.
    """
    digest = xxhash.xxh3_128()
    empty = True
    for content in _beginning(route, body):
        for part in content if isinstance(content, list) else [content]:
            shown = text_of(part)
            if isinstance(part, dict) and part.get("type") == "media_ref":
                shown = items[part["item"]].digest
            empty = empty and not shown
            digest.update(msgspec.json.encode(shown))
        digest.update(b"\n")
    return "" if empty else digest.hexdigest()


def _beginning(route: str, body: dict[str, Any]) -> Iterator[object]:
    entries = body.get(PROMPT_FIELDS[route])
    if route == RESPONSES:
        yield body.get("instructions")
        if isinstance(entries, str):
            yield entries
    if route not in CONTENT_FIELDS or not isinstance(entries, list):
        return
    for entry in entries:
        if isinstance(entry, dict):
            yield from (entry.get(name) for name in CONTENT_FIELDS[route])
        if route != CHAT or (isinstance(entry, dict) and entry.get("role") == "user"):
            return


def choose(key: str, loads: Sequence[Load], *, holders: Sequence[str] = ()) -> tuple[str, Outcome]:
    """The place of a request, and why. Pure policy.

    Args:
        key: What it begins with.
        loads: Of the workers that could do it.
        holders: Those of them that are known to hold what it needs, the best first: they come before those
            that hashing names.
    """
    if len(loads) < 2:
        return ANY_PLACE, "unplaced"
    by_name = {load.worker: load for load in loads}
    bound = FACTOR * sum(load.backlog for load in loads) / len(loads) + 1
    known = [name for name in holders if name in by_name]
    order = [*known, *ranked(key, by_name.keys() - set(known))]
    for number, name in enumerate(order[:TRIES]):
        load = by_name[name]
        if load.backlog <= bound and load.backlog < load.slots:
            return name, "held" if name in known else "next" if number else "nearest"
    return ANY_PLACE, "crowded"


def holders_of(
    key: str,
    beginnings: Sequence[Beginning],
    keys: Sequence[str],
    workers: Mapping[str, str],
    *,
    held_by: Callable[[str], Set[str]],
    nodes_of: Callable[[str], Set[str]],
) -> list[str]:
    """Workers that hold what a request needs, the best first. Pure policy.

    Who holds a longer beginning comes before others, and then who has more of the embeddings on its node
    than all have. Among equals it is as for those that hold nothing: the nearest to ``key`` first.

    Args:
        key: What the request begins with, as for :func:`choose`.
        beginnings: Its beginnings, the longest last.
        keys: Of its embeddings.
        workers: Those that could do it, and their nodes.
        held_by: Gives the keys of the beginnings that a worker holds.
        nodes_of: Gives the nodes on which an embedding lies.
    """
    lies = [nodes_of(embedding) for embedding in set(keys)]
    near = {worker: sum(node in nodes for nodes in lies) for worker, node in workers.items()}
    everywhere = min(near.values(), default=0)
    worth: dict[str, tuple[int, int]] = {}
    for worker in workers:
        holds = held_by(worker)
        tokens = (named.tokens for named in reversed(beginnings) if named.key in holds)
        worth[worker] = (next(tokens, 0), near[worker] - everywhere)
    best = ranked(key, [worker for worker in workers if any(worth[worker])])
    return sorted(best, key=lambda worker: worth[worker], reverse=True)


class Workers(Protocol):
    """The part of the registry that placing needs."""

    def answering(self, model: str) -> list[WorkerRecord]: ...


def _nothing_known(name: str) -> Set[str]:
    del name
    return frozenset()


class Placing:
    """Places the requests of one process.

    A worker's work is what it said at its last heartbeat, and what was placed there from here since and has
    not ended.

    Args:
        noted: Told of each request how it was placed.
        held_by: Gives the keys of the beginnings that a worker holds, as far as that is known.
        nodes_of: Gives the nodes on which an embedding lies, as far as that is known.
    """

    def __init__(
        self,
        workers: Workers,
        noted: Callable[[Outcome], object],
        *,
        held_by: Callable[[str], Set[str]] = _nothing_known,
        nodes_of: Callable[[str], Set[str]] = _nothing_known,
    ) -> None:
        self._held_by = held_by
        self._nodes_of = nodes_of
        self._workers = workers
        self._noted = noted
        self._placed: dict[str, tuple[int, int]] = {}
        """Of a worker: the beat since which, and how many."""

    @contextlib.contextmanager
    def placed(
        self, route: str, body: dict[str, Any], items: Sequence[Item], worker: WorkerRecord
    ) -> Iterator[tuple[str, Outcome]]:
        """The place of a prepared request, which ends with the context, and how it was found.

        Args:
            worker: One that could do it; so could others of its model and fingerprint.
        """
        place, outcome = self._place(route, body, items, worker)
        self._noted(outcome)
        since, _ = self._placed.get(place, (0, 0))
        try:
            yield place, outcome
        finally:
            beat, count = self._placed.get(place, (0, 0))
            if count and beat == since:  # else a heartbeat has said since what there is
                self._placed[place] = beat, count - 1

    def _place(
        self, route: str, body: dict[str, Any], items: Sequence[Item], worker: WorkerRecord
    ) -> tuple[str, Outcome]:
        key = prefix_key(route, body, items)
        if not key or _prompt_tokens(route, body, items, worker) < MIN_TOKENS:
            return ANY_PLACE, "unplaced"
        records = [
            record
            for record in self._workers.answering(worker.model)
            if record.fingerprint == worker.fingerprint
        ]
        loads = [
            Load(record.worker, record.busy + self._since(record), record.slots)
            for record in records
        ]
        holders = holders_of(
            key,
            beginnings_of(route, body, items),
            [item.key for item in items],
            {record.worker: record.node for record in records},
            held_by=self._held_by,
            nodes_of=self._nodes_of,
        )
        place, outcome = choose(key, loads, holders=holders)
        for record in records:
            if record.worker == place:
                if len(self._placed) > MOST_KNOWN:  # workers of long ago among them
                    self._placed.clear()
                self._placed[place] = record.beat, self._since(record) + 1
        return place, outcome

    def _since(self, record: WorkerRecord) -> int:
        """Requests that were placed there since its last beat."""
        beat, count = self._placed.get(record.worker, (0, 0))
        return count if beat == record.beat else 0


def _prompt_tokens(
    route: str, body: dict[str, Any], items: Sequence[Item], worker: WorkerRecord
) -> int:
    work = work_of(route, body, items, [None] * len(items), max_model_len=worker.max_model_len)
    return work.text + (work.visual or 0)
