"""What both simulated engines are: loops in the service's own process, which can encode where told to."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epd_common.decoding.pictures import CorruptError, TooManyPixelsError, decode
from epd_common.engines import EngineInfo, OnSized, Progress, StagedEmbedding
from epd_common.errors import BadRequestError, UpstreamError
from epd_common.tasks import end
from epd_sim.device import Device, PunctualSleep, Sleep
from epd_sim.embedding import DTYPE
from epd_sim.faults import EngineDiedError, FaultPlan
from epd_sim.profiles import Profile
from epd_sim.sizing import MERGE, size_of
from epd_sim.tower import Tower

logger = logging.getLogger(__name__)

MAX_PIXELS = 200_000_000
"""Of a picture that is decoded; who lets requests in has smaller bounds."""

MODALITIES = ("image", "video", "audio")
SPECIAL_TOKENS = ("<|image_pad|>", "<|im_end|>", "<|im_start|>", "<|vision_start|>")
SPECIAL_TOKEN_IDS = (151655, 151645, 151644, 151652)
"""Those of Qwen's template that matter: clients are refused them, as with a real model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """What an operator says of a simulated engine.

    Attributes:
        served: Name that clients use.
        revision: Part of the fingerprint, as with a real model.
        decodes: Whether pictures are decoded before they are encoded, as a real engine does; it takes
            real time, and the pixels are thrown away.
        prefix_caching: Whether what was prefilled is kept for prompts that begin alike, as vLLM does.
    """

    served: str
    revision: str = ""
    decodes: bool = False
    prefix_caching: bool = True
    profile: Profile
    plan: FaultPlan = field(default_factory=FaultPlan)


class SimEngine:
    """Starts, encodes and stops; what else it does is for its kinds to say.

    Args:
        staging: The arena's staging folder of this worker.
        encodes: Whether it has towers.
        sleep: Lets simulated time pass; in real time by default.
    """

    def __init__(
        self,
        options: SimOptions,
        *,
        staging: Path,
        encodes: bool = True,
        sleep: Sleep | None = None,
    ) -> None:
        self._options = options
        self._profile = options.profile
        self._encodes = encodes
        self._device = Device(sleep or PunctualSleep(), slow_factor=options.plan.slow_factor)
        self._fingerprint = sim_fingerprint(options)
        self._tower = Tower(
            options.profile,
            fingerprint=self._fingerprint,
            staging=staging,
            device=self._device,
            plan=options.plan,
        )
        self._loops: list[asyncio.Task[None]] = []
        self._alive = False

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def steps(self) -> int:
        return self._device.computed

    @property
    def owes(self) -> bool:
        return self._tower.owes

    @property
    def batches(self) -> Mapping[int, int]:
        return self._tower.batches

    async def start(self, progress: Progress) -> EngineInfo:
        progress(f"simulating {self._profile.name}")
        self._alive = True
        if self._encodes:
            self._run("tower", self._tower.run)
        progress("ready")
        return EngineInfo(
            model=self._options.served,
            fingerprint=self._fingerprint,
            modalities=MODALITIES,
            max_model_len=self._profile.max_model_len,
            special_tokens=SPECIAL_TOKENS,
            special_token_ids=SPECIAL_TOKEN_IDS,
            max_item_rows=self._profile.max_item_rows,
            encodes=self._encodes,
            width=self._profile.width,
            dtype=DTYPE,
            merge=MERGE,
            versions={
                "sim": self._profile.name,
                "epdflow": importlib.metadata.version("epdflow"),
            },
        )

    async def encode(
        self,
        key: str,
        data: bytes,
        modality: str,
        processor_args: dict[str, Any],
        on_sized: OnSized,
    ) -> StagedEmbedding:
        if not self._encodes:
            raise RuntimeError("the engine has no towers")
        size = await asyncio.to_thread(
            size_of,
            modality,
            data,
            processor_args,
            patch=self._profile.patch,
            max_rows=self._profile.max_rows,
        )
        if self._options.decodes and modality == "image":
            await asyncio.to_thread(_decode, data)
        await on_sized(size.metadata)
        try:
            return await self._tower.encode(key, data, size)
        except EngineDiedError as error:
            raise UpstreamError("the encoder's engine died", stage="encode", key=key) from error

    async def stop(self) -> None:
        self._die()
        await end(*self._loops)
        self._loops.clear()

    def _run(self, name: str, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one of the engine's loops until the engine stops; its failure is the engine's death."""
        self._loops.append(asyncio.create_task(self._guard(loop), name=f"sim {name}"))

    async def _guard(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await loop()
        except EngineDiedError as error:
            logger.error("the simulated engine %s", error)
        except Exception:
            logger.exception("the simulated engine died by an unexpected error")
        finally:
            self._die()

    def _die(self) -> None:
        """Nothing works any more; who waits is told."""
        self._alive = False
        self._tower.die()


def _decode(data: bytes) -> None:
    try:
        decode(data, MAX_PIXELS)
    except (CorruptError, TooManyPixelsError) as error:
        raise BadRequestError(
            f"the picture cannot be decoded: {error}", code="invalid_image", stage="encode"
        ) from error


def sim_fingerprint(options: SimOptions) -> str:
    """The fingerprint of a simulated model, 64 hex characters: its name, and the shape of its embeddings."""
    profile = options.profile
    lines = (
        "epd-sim-1",
        options.served,
        options.revision,
        profile.name,
        str(profile.patch),
        str(profile.width),
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
