"""What the scheduler's process knows of embeddings: which are pinned, and who waits for one.

The connector, the encoder-cache manager and the scheduler share one gate. All it ever does outside of memory
is a ``stat`` on tmpfs, once a key and scheduling pass, and one read of a header when an item is first seen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd_common.store.embedding import IntegrityError
from epd_vllm.embedding_io import read_header

if TYPE_CHECKING:
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class Gate:
    """Decides which items of a request may be scheduled.

    A request names the keys that it expects to be pinned in ``ec_transfer_params``, each with the fingerprint
    that its embedding must have. Other items are none of our business: the engine encodes them itself.

    Args:
        pins: The folder in which the service pins embeddings for this engine.
        width: Values in a row that the model takes, and ``dtype`` theirs.
    """

    def __init__(self, pins: Path, *, width: int, dtype: str) -> None:
        self._pins = pins
        self._width = width
        self._dtype = dtype
        self.manager: EncoderCacheManager | None = None
        self._pinned: dict[str, bool] = {}
        self._checked: dict[str, set[str]] = {}
        self._unavailable: set[str] = set()
        self._barred: set[str] = set()
        self.missing: set[str] = set()
        """Keys for which an item was held back in this pass."""

    def path(self, key: str) -> Path:
        return self._pins / key

    def pinned(self, key: str) -> bool:
        """Whether the key is pinned: one answer for a whole pass, so that all who ask agree."""
        if key not in self._pinned:
            self._pinned[key] = self.path(key).exists()
        return self._pinned[key]

    def new_pass(self) -> None:
        """Forget what may have changed since the last scheduling pass."""
        self._pinned.clear()

    def arrived(self) -> bool:
        """Whether a key that held an item back is pinned by now."""
        return any(self.path(key).exists() for key in self.missing)

    # -- per request ---------------------------------------------------------------------------

    def holds_back(self, request: Request, index: int) -> bool:
        """Whether an item must wait for its embedding; prefill then stops at its start."""
        key = request.mm_features[index].identifier
        if key not in _managed(request) or self.pinned(key):
            return False
        self.missing.add(key)
        return True

    def waits(self, request: Request) -> bool:
        """Whether an item that a request still has to prefill is not here."""
        managed = _managed(request)
        return any(
            feature.identifier in managed
            and feature.mm_position.offset + feature.mm_position.length
            > request.num_computed_tokens
            and not self._resident(feature.identifier)
            and not self.pinned(feature.identifier)
            for feature in (request.mm_features if managed else ())
        )

    def bar(self, request_id: str) -> None:
        """Let a request in again only when all its items are here."""
        self._barred.add(request_id)

    def admits(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether anything of the request can be scheduled now.

        False exactly where its next token belongs to an item that is missing, or an item is unusable:
        a request that is let in and then gets no token would stop the admission of all others.
        """
        managed = _managed(request)
        for feature in request.mm_features if managed else ():
            key, position = feature.identifier, feature.mm_position
            if key not in managed or position.offset + position.length <= num_computed_tokens:
                continue
            if self._resident(key) or key in self._checked.get(request.request_id, ()):
                continue
            if not self.pinned(key):
                self.missing.add(key)
                barred = request.request_id in self._barred
                return bool(position.offset > num_computed_tokens) and not barred
            if reason := self._fault(key, position.get_num_embeds(), managed[key]["fingerprint"]):
                logger.error("request %s: %s", request.request_id, reason)
                self._unavailable.add(request.request_id)
                return False
            self._checked.setdefault(request.request_id, set()).add(key)
        return True

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._checked.pop(request_id, None)
        self._barred.discard(request_id)

    def take_unavailable(self) -> set[str]:
        """Requests with an unusable item; each is told once."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    @property
    def has_unavailable(self) -> bool:
        return bool(self._unavailable)

    def _resident(self, key: str) -> bool:
        """In the engine's own cache an item needs no file."""
        return self.manager is not None and key in self.manager.cached

    def _fault(self, key: str, placeholders: int, fingerprint: str) -> str | None:
        """Why an embedding cannot be used. In the worker it would take the engine with it."""
        try:
            header = read_header(self.path(key))
        except FileNotFoundError:
            return f"embedding {key} is not pinned on this node"
        except IntegrityError as error:
            return error.message
        if header.rows != placeholders:
            return f"embedding {key} has {header.rows} rows for {placeholders} placeholders"
        if (header.width, header.dtype) != (self._width, self._dtype):
            return (
                f"embedding {key} has rows of {header.width} {header.dtype} values, the model takes "
                f"{self._width} {self._dtype}"
            )
        if header.fingerprint != fingerprint:
            return f"embedding {key} was made by another model: {header.fingerprint}"
        return None


def _managed(request: Request) -> dict[str, Any]:
    params: dict[str, Any] | None = request.ec_transfer_params
    return params or {}


def managed_params(keys: Iterable[str], fingerprint: str) -> dict[str, Any]:
    """``ec_transfer_params`` of a request that expects ``keys`` to be pinned, now or later."""
    return {key: {"fingerprint": fingerprint} for key in keys}
