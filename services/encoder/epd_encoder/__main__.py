"""``epd-encoder``: settings in, exit code out."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from epd_common.health import main_healthcheck
from epd_common.lifecycle import run_service
from epd_encoder.service import EncoderService
from epd_encoder.settings import EncoderSettings


async def serve(settings: EncoderSettings, stop: asyncio.Event) -> None:
    # Imported here, so that a mistake in the settings is told before vLLM's packages are loaded.
    from epd_vllm.encoder_engine import VllmEncoderEngine
    from epd_vllm.engine import EngineOptions

    def make_engine(staging: Path) -> VllmEncoderEngine:
        return VllmEncoderEngine(
            EngineOptions(
                model=settings.model,
                served=settings.model_name,
                revision=settings.revision,
                max_batch=settings.encoder_slots,
                extra_arguments=settings.engine_args,
            ),
            staging=staging,
        )

    await EncoderService(settings, make_engine).run(stop)


def main() -> None:
    if "--healthcheck" in sys.argv[1:]:
        sys.exit(main_healthcheck("encoder"))
    sys.exit(run_service(EncoderSettings, serve))


if __name__ == "__main__":
    main()
