"""The encoder engine: vLLM as ``ec_producer``, which runs a model's towers and nothing else."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from epd_common.engines import EngineInfo, OnSized, Progress, StagedEmbedding
from epd_common.protocol.jobs import Modality
from epd_vllm.item_encoder import ItemEncoder
from epd_vllm.launch import engine_arguments, launch, shut_down
from epd_vllm.modalities import modalities_of
from epd_vllm.model import describe, model_folder

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class VllmEncoderEngine:
    """Runs the towers of a model.

    Args:
        staging: The arena's staging folder of this worker.
        extra_arguments: More engine arguments, as typed in a shell.
    """

    def __init__(
        self,
        *,
        model: str,
        served: str,
        revision: str,
        staging: Path,
        max_batch: int,
        extra_arguments: str = "",
    ) -> None:
        self._model = model
        self._served = served
        self._revision = revision
        self._staging = staging
        self._max_batch = max_batch
        self._extra = extra_arguments
        self._engine: AsyncLLM | None = None
        self._encoder: ItemEncoder | None = None

    @property
    def alive(self) -> bool:
        return self._engine is not None and not self._engine.errored

    async def start(self, progress: Progress) -> EngineInfo:
        await asyncio.to_thread(model_folder, self._model)  # a clear error comes before a long load
        role = {
            "--model": self._model,
            "--served-model-name": self._served,
            "--max-num-seqs": str(self._max_batch),
            "--mm-encoder-only": None,
            "--no-enable-prefix-caching": None,
            "--disable-log-stats": None,
            "--limit-mm-per-prompt": json.dumps(dict.fromkeys(get_args(Modality), 1)),
            # The processor's own cache would keep pixels of media that are encoded once.
            "--mm-processor-cache-gb": "0",
            "--ec-transfer-config": json.dumps(
                {
                    "ec_connector": "EpdConnector",
                    "ec_connector_module_path": "epd_vllm.connector",
                    "ec_role": "ec_producer",
                    "ec_connector_extra_config": {"staging": str(self._staging)},
                }
            ),
        }
        if self._revision:
            role["--revision"] = self._revision
        self._engine, _ = await launch(engine_arguments(role=role, extra=self._extra), progress)
        info = describe(
            self._engine,
            model=self._model,
            served=self._served,
            revision=self._revision,
            modalities=modalities_of(self._engine.model_config),
            encodes=True,
        )
        self._encoder = await asyncio.to_thread(
            ItemEncoder,
            self._engine,
            fingerprint=info.fingerprint,
            staging=self._staging,
            modalities=info.modalities,
        )
        progress("ready")
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
            raise RuntimeError("the engine was not started")
        return await self._encoder.encode(key, data, modality, processor_args, on_sized)

    async def stop(self) -> None:
        if self._engine is None:
            return
        await shut_down(self._engine)
        self._engine = None
        self._encoder = None
