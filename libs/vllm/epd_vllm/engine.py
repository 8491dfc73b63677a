"""What both engines are: an ``AsyncLLM`` for a model, which can encode items if it has the model's towers."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd_common.engines import EngineInfo, OnSized, Progress, StagedEmbedding
from epd_vllm.item_encoder import ItemEncoder
from epd_vllm.launch import engine_arguments, launch, shut_down
from epd_vllm.modalities import Modalities
from epd_vllm.model import describe

if TYPE_CHECKING:
    from epd_vllm.continuing import ContinuingLLM

TRACES = "--otlp-traces-endpoint"
"""vLLM's option to send spans of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an operator says of an engine.

    Attributes:
        model: Path or hub id.
        served: Name that clients use.
        max_batch: Sequences that run at once, as vLLM's ``--max-num-seqs``.
        extra_arguments: More engine arguments, as typed in a shell.
        log_stats: Have vLLM keep its own metrics (``vllm:``), which costs a little in each step.
    """

    model: str
    served: str
    revision: str = ""
    max_batch: int
    extra_arguments: str = ""
    log_stats: bool = False


class VllmEngine:
    """Loads, encodes and stops; what else it does is for its kinds to say.

    Args:
        staging: The arena's staging folder of this worker.
    """

    def __init__(self, options: EngineOptions, *, staging: Path) -> None:
        self._options = options
        self._staging = staging
        self._engine: ContinuingLLM | None = None
        self._encoder: ItemEncoder | None = None
        self._steps = 0
        self._batches: Counter[int] = Counter()

    @property
    def steps(self) -> int:
        return self._steps

    @property
    def owes(self) -> bool:
        return self._encoder is not None and self._encoder.running > 0

    @property
    def batches(self) -> Mapping[int, int]:
        return self._batches

    @property
    def alive(self) -> bool:
        return self._engine is not None and not self._engine.errored

    def _arguments(self, role: dict[str, str | None]) -> list[str]:
        """The engine's command line with the options of a role."""
        given = self._options
        options = {
            "--model": given.model,
            "--served-model-name": given.served,
            "--max-num-seqs": str(given.max_batch),
            # The processor's own cache would keep media that are encoded once, and takes an item that it
            # knows for one whose pixels are not needed.
            "--mm-processor-cache-gb": "0",
            **role,
        }
        # vLLM's own spans are made of its statistics: it dies of a request with a trace where it keeps none.
        if not given.log_stats and TRACES not in given.extra_arguments:
            options["--disable-log-stats"] = None
        if given.revision:
            options["--revision"] = given.revision
        return engine_arguments(role=options, extra=given.extra_arguments)

    async def _launch(
        self, arguments: list[str], progress: Progress
    ) -> tuple[ContinuingLLM, Namespace]:
        self._engine, parsed = await launch(arguments, progress)
        self._count_steps(self._engine)
        return self._engine, parsed

    def _count_steps(self, engine: ContinuingLLM) -> None:
        """Count the steps that gave something, and the items that each finished: what the engine's process
        sends of each is the only sign of its life that costs nothing."""
        receive = engine.engine_core.get_output_async

        async def counted() -> Any:
            outputs = await receive()
            self._steps += 1
            for output in outputs.outputs:
                if output.prefill_stats and (notes := engine.notes.get(output.request_id)):
                    notes.prefilled(output.prefill_stats)
            # Only who was encoded, and has ended with that, brings an item's metadata.
            if items := sum(bool(output.ec_transfer_params) for output in outputs.outputs):
                self._batches[items] += 1
            return outputs

        engine.engine_core.get_output_async = counted

    async def _loaded(self, modalities: Modalities, *, encodes: bool) -> EngineInfo:
        """What was loaded; with ``encodes`` it takes items from now on."""
        assert self._engine is not None
        info = describe(
            self._engine,
            model=self._options.model,
            served=self._options.served,
            revision=self._options.revision,
            modalities=modalities,
            encodes=encodes,
        )
        if encodes:
            self._encoder = await asyncio.to_thread(
                ItemEncoder,
                self._engine,
                fingerprint=info.fingerprint,
                staging=self._staging,
                modalities=modalities.all,
            )
        return info

    async def encode(
        self,
        key: str,
        data: bytes,
        modality: str,
        processor_args: dict[str, Any],
        on_sized: OnSized,
    ) -> StagedEmbedding:
        if self._encoder is None:
            raise RuntimeError("the engine was not started, or without its towers")
        return await self._encoder.encode(key, data, modality, processor_args, on_sized)

    async def stop(self) -> None:
        if self._engine is None:
            return
        await shut_down(self._engine)
        self._engine = None
        self._encoder = None
