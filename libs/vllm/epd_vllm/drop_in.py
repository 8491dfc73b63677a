"""The arena for plain ``vllm serve``: a connector in the place of vLLM's own ``ECExampleConnector``.

No service of this package runs beside it. A producer publishes each embedding itself, and whoever needs one
finds it in the node's arena: a consumer, a second consumer, or the producer after its own cache has dropped
it. Embeddings have a quota, the least recently used goes first, and what is damaged, foreign or missing
fails the requests that need it, never the engine.

Configured by ``ec_connector_extra_config``, see ``DropInSettings``; ``docs/drop-in.md`` has the commands.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

from epd_common.errors import EpdError
from epd_common.store.arena import Arena
from epd_common.store.embedding import IntegrityError
from epd_vllm.arena_pins import ArenaPins, Fit, Holding
from epd_vllm.embedding_io import device, map_tensor, seal, write_staged
from epd_vllm.fingerprint import model_fingerprint
from epd_vllm.model import embedding_width, model_folder

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class DropInSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``ec_connector_extra_config`` may hold.

    ``wait_s``: for how long a request without pixels waits for an embedding that is not in the arena.
    """

    arena_dir: str = "/dev/shm/epdflow"
    arena_bytes: Annotated[int, msgspec.Meta(ge=1 << 16)] = 2 << 30
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 2.0


@dataclass
class ArenaStep(ECConnectorMetadata):
    """What the workers do in one engine step.

    ``loads``: identifiers, each with its pinned file and its rows. ``saves``: identifiers to publish if the
    worker's own cache holds them.
    """

    loads: dict[str, tuple[str, int]] = field(default_factory=dict)
    saves: list[str] = field(default_factory=list)


@dataclass
class FailedLoads(ECConnectorWorkerMetadata):
    """Identifiers that a worker could not load, and for which it put zeros into the engine's cache."""

    identifiers: set[str]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        assert isinstance(other, FailedLoads)
        return FailedLoads(self.identifiers | other.identifiers)


class ArenaConnector(ECConnectorBase):
    """See the module's text. One instance lives in the scheduler's process, one in each worker's.

    An exception out of a hook ends the engine, so each catches its own.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self._settings = _settings(vllm_config)
        self._fit = _fit(vllm_config.model_config)
        self._arena: Arena | None = None
        self._pins: ArenaPins | None = None
        # The scheduler's side.
        self._resolver = PlaceholderMetadataResolver(vllm_config.model_config)
        self._loads: dict[str, tuple[str, int]] = {}
        self._missing_since: dict[str, float] = {}
        self._unavailable: set[str] = set()
        self._zeroed: set[str] = set()
        """Identifiers for which the workers' caches hold zeros; each worker has such a set of its own."""
        self._failed: set[str] = set()
        if role is ECConnectorRole.SCHEDULER:
            self._pins = ArenaPins(self._open_arena(), self._fit)
            self._resolver.fields_for("image")  # builds a processor, which takes a while
        elif self.is_producer and vllm_config.parallel_config.rank == 0:
            self._arena = self._open_arena()  # all ranks have the same embedding; one writes it

    def _open_arena(self) -> Arena:
        """An arena with folders of this process's own; what it leaves if killed goes with the next start."""
        arena = Arena(
            Path(self._settings.arena_dir),
            quota_bytes=self._settings.arena_bytes,
            worker=f"vllm-{uuid.uuid4().hex}",
        )
        arena.open()
        return arena

    def shutdown(self) -> None:
        if self._pins is not None:
            self._pins.close()
        if self._arena is not None:
            self._arena.close()

    def _key(self, identifier: str) -> str:
        """An item's key in the arena: vLLM's identifier may be any string, e.g. a client's ``uuid``."""
        lines = ("epd-drop-in-1", self._fit.fingerprint, identifier)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    # -- scheduler -----------------------------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the engine need not encode it: some request holds it, and so does the one at hand."""
        return self._pins is not None and self._pins.ready(self._key(identifier))

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        try:
            return self._admits(request, num_computed_tokens)
        except Exception:
            logger.exception("request %s fails", request.request_id)
            self._unavailable.add(request.request_id)
            return False

    def _admits(self, request: Request, num_computed_tokens: int) -> bool:
        """Hold all embeddings that a request still needs; whether it can run now."""
        last = request.mm_features[-1].mm_position
        if last.offset + last.length <= num_computed_tokens:
            return True  # asked in each step of a request, most of which generate
        complete = True
        missing = None
        for feature in request.mm_features:
            position = feature.mm_position
            if position.offset + position.length <= num_computed_tokens:
                continue
            holding = self._hold(request.request_id, feature)
            if holding is None:
                return False
            if holding is Holding.CHECKING:
                complete = False
            elif holding is Holding.MISSING and self._has_no_pixels(feature):
                missing = feature.identifier
        if missing is None:
            self._missing_since.pop(request.request_id, None)
            return complete
        since = self._missing_since.setdefault(request.request_id, time.monotonic())
        if time.monotonic() - since >= self._settings.wait_s:
            logger.error(
                "request %s fails: no embedding of item %r was in the arena at %s for %g s; was it "
                "evicted (raise arena_bytes), or has its encoder another model, dtype or arena_dir?",
                request.request_id,
                missing,
                self._settings.arena_dir,
                self._settings.wait_s,
            )
            self._unavailable.add(request.request_id)
        return False

    def _hold(self, request_id: str, feature: MultiModalFeatureSpec) -> Holding | None:
        """Hold one item's embedding; None if the request cannot go on with what is there."""
        assert self._pins is not None
        identifier, rows = feature.identifier, feature.mm_position.get_num_embeds()
        key = self._key(identifier)
        try:
            holding = self._pins.acquire(key, request_id, rows)
        except IntegrityError as error:
            if not self._has_no_pixels(feature) and not self._pins.users(key):
                logger.warning("item %r is encoded again: %s", identifier, error.message)
                return Holding.MISSING
            logger.error("request %s fails: item %r: %s", request_id, identifier, error.message)
            self._unavailable.add(request_id)
            return None
        if holding is Holding.READY and identifier in self._zeroed:
            self._loads[identifier] = (str(self._pins.path(key)), rows)
        return holding

    def _has_no_pixels(self, feature: MultiModalFeatureSpec) -> bool:
        """Whether an item is metadata alone, so that the engine cannot encode it."""
        if feature.data is None:
            return True
        return feature.data.keys() <= self._resolver.fields_for(feature.modality)

    def take_unavailable_requests(self) -> set[str]:
        taken, self._unavailable = self._unavailable, set()
        return taken

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        feature = request.mm_features[index]
        if self._pins is not None and self.has_cache_item(feature.identifier):
            path = self._pins.path(self._key(feature.identifier))
            self._loads[feature.identifier] = (str(path), feature.mm_position.get_num_embeds())

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ArenaStep:
        step = ArenaStep(loads=self._loads)
        self._loads = {}
        if self.is_producer:
            # An item in the engine's own cache is not encoded again, so save_caches is not called for it.
            step.saves = [
                feature.identifier
                for request in scheduler_output.scheduled_new_reqs
                for feature in request.mm_features
            ]
        if scheduler_output.total_num_scheduled_tokens:  # else no worker sees the step
            self._zeroed.difference_update(step.loads)
        self._zeroed.difference_update(scheduler_output.free_encoder_mm_hashes)
        return step

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        """Fail whoever may have been given zeros; the item is loaded again for the next one."""
        failed = connector_output.ec_connector_worker_meta
        if self._pins is None or not isinstance(failed, FailedLoads):
            return
        self._zeroed |= failed.identifiers
        for identifier in failed.identifiers:
            self._unavailable |= self._pins.users(self._key(identifier))

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """A producer reports identifier and grid of each encoded item with the answer."""
        self._missing_since.pop(request.request_id, None)
        if self._pins is not None:
            self._pins.release(request.request_id)
        if not self.is_producer:
            return False, None
        return False, collect_ec_item_metadata(request.mm_features, self._resolver) or None

    # -- worker --------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, ArenaStep)
        for identifier, (path, rows) in step.loads.items():
            if identifier not in encoder_cache or identifier in self._zeroed:
                encoder_cache[identifier] = self._load(identifier, Path(path), rows)

    def _load(self, identifier: str, path: Path, rows: int) -> torch.Tensor:
        """The embedding, copied: the engine may keep it for longer than the arena.

        Zeros where it cannot be had although it was pinned and verified: without a tensor the engine would
        die. The scheduler's side learns of it and fails the requests.
        """
        self._zeroed.discard(identifier)
        try:
            return map_tensor(path).to(device(), copy=True)
        except Exception:
            logger.exception("cannot load the embedding of item %r from %s", identifier, path)
        self._zeroed.add(identifier)
        self._failed.add(identifier)
        return torch.zeros(
            rows, self._fit.width, dtype=getattr(torch, self._fit.dtype), device=device()
        )

    def build_connector_worker_meta(self) -> FailedLoads | None:
        failed, self._failed = self._failed, set()
        return FailedLoads(failed) if failed else None

    def start_save_caches(self, **kwargs: Any) -> None:
        step = self._get_connector_metadata()
        assert isinstance(step, ArenaStep)
        encoder_cache: dict[str, torch.Tensor] = kwargs["encoder_cache"]
        if not self.is_consumer:  # vLLM calls start_load_caches for consumers only
            self.start_load_caches(encoder_cache)
        self._publish((name, encoder_cache[name]) for name in step.saves if name in encoder_cache)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        self._publish([(mm_hash, encoder_cache[mm_hash])])

    def _publish(self, items: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put embeddings into the arena that are not there; whoever waits for one that fails will say so."""
        if self._arena is None:
            return
        for identifier, tensor in items:
            key = self._key(identifier)
            if identifier in self._zeroed or self._arena.touch(key):
                continue
            staged = self._arena.staging / key
            try:
                # vLLM casts it when it is merged into the prompt; before that, one dtype for all.
                write_staged(staged.parent, key, tensor.to(getattr(torch, self._fit.dtype)))
                header = seal(staged, key=key, fingerprint=self._fit.fingerprint, metadata={})
                self._arena.adopt(staged, header)
            except (EpdError, OSError) as error:
                logger.error(
                    "the embedding of item %r (%d bytes) is not published: %s; if there is no room, "
                    "raise arena_bytes (%d now) or the size of the tmpfs at %s",
                    identifier,
                    tensor.nbytes,
                    error,
                    self._settings.arena_bytes,
                    self._settings.arena_dir,
                )
            except Exception:
                logger.exception("the embedding of item %r is not published", identifier)
            finally:
                for path in (staged, staged.with_name(f".{key}")):
                    path.unlink(missing_ok=True)


def _settings(config: VllmConfig) -> DropInSettings:
    """The settings, checked, and what this connector cannot work with.

    Raises:
        ValueError: naming the setting.
    """
    try:
        settings = msgspec.convert(
            config.ec_transfer_config.ec_connector_extra_config, DropInSettings
        )
    except msgspec.ValidationError as error:
        names = ", ".join(DropInSettings.__struct_fields__)
        raise ValueError(
            f"ec_connector_extra_config of ArenaConnector: {error}; it takes {names}"
        ) from error
    if config.parallel_config.nnodes > 1:
        raise ValueError(
            f"ArenaConnector needs all workers of an instance on one node, not on "
            f"{config.parallel_config.nnodes}: an arena is a folder of its node"
        )
    if config.model_config.multimodal_config is None:
        raise ValueError(
            f"ArenaConnector needs a multimodal model, {config.model_config.model} is none"
        )
    if config.model_config.multimodal_config.mm_processor_cache_type == "shm":
        raise ValueError(
            "ArenaConnector cannot see which items have pixels with --mm-processor-cache-type shm; "
            "use lru"
        )
    return settings


def _fit(config: ModelConfig) -> Fit:
    """What the embeddings of a model look like, the same for its encoders and its consumers."""
    width = embedding_width(config)
    dtype = str(config.dtype).removeprefix("torch.")
    fingerprint = model_fingerprint(
        model_folder(config.model), revision=config.revision or "", dtype=dtype, width=width
    )
    return Fit(fingerprint, width, dtype)
