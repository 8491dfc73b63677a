"""``epd-pd``: settings in, exit code out."""

from __future__ import annotations

import asyncio
import sys

from epd_common.health import main_healthcheck
from epd_common.lifecycle import run_service
from epd_common.store import Arena
from epd_pd.service import PdService
from epd_pd.settings import PdSettings


async def serve(settings: PdSettings, stop: asyncio.Event) -> None:
    # Imported here, so that a mistake in the settings is told before vLLM's packages are loaded.
    from epd_vllm.engine import EngineOptions
    from epd_vllm.pd_engine import VllmPdEngine

    def make_engine(arena: Arena) -> VllmPdEngine:
        return VllmPdEngine(
            EngineOptions(
                model=settings.model,
                served=settings.model_name,
                revision=settings.revision,
                max_batch=settings.max_num_seqs,
                extra_arguments=settings.engine_args,
            ),
            arena=arena,
            max_items=settings.max_items,
            encode="always" if settings.ec_role == "ec_both" else settings.local_encode,
            sleep_when_stalled=settings.sleep_when_stalled,
        )

    await PdService(settings, make_engine).run(stop)


def main() -> None:
    if "--healthcheck" in sys.argv[1:]:
        sys.exit(main_healthcheck("pd"))
    sys.exit(run_service(PdSettings, serve))


if __name__ == "__main__":
    main()
