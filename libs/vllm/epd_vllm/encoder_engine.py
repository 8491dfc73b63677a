"""The encoder engine: vLLM as ``ec_producer``, which runs a model's towers and nothing else."""

from __future__ import annotations

import asyncio
import json
from typing import get_args

from epd_common.engines import EngineInfo, Progress
from epd_common.protocol.jobs import Modality
from epd_vllm.engine import VllmEngine
from epd_vllm.modalities import modalities_of
from epd_vllm.model import check_model


class VllmEncoderEngine(VllmEngine):
    """Runs the towers of a model."""

    async def start(self, progress: Progress) -> EngineInfo:
        # A clear error comes before a long load.
        await asyncio.to_thread(check_model, self._options.model, self._options.extra_arguments)
        arguments = self._arguments(
            {
                "--mm-encoder-only": None,
                "--no-enable-prefix-caching": None,
                "--limit-mm-per-prompt": json.dumps(dict.fromkeys(get_args(Modality), 1)),
                "--ec-transfer-config": json.dumps(
                    {
                        "ec_connector": "EpdConnector",
                        "ec_connector_module_path": "epd_vllm.connector",
                        "ec_role": "ec_producer",
                        "ec_connector_extra_config": {"staging": str(self._staging)},
                    }
                ),
            }
        )
        engine, _ = await self._launch(arguments, progress)
        info = await self._loaded(modalities_of(engine.model_config, allowed=True), encodes=True)
        progress("ready")
        return info
