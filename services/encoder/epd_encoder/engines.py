"""Which engine an encoder runs. Each is imported where it is chosen: the simulated one needs no vLLM."""

from __future__ import annotations

from pathlib import Path

from epd_common.engines import EncoderEngine
from epd_encoder.settings import EncoderSettings


def make_engine(settings: EncoderSettings, staging: Path) -> EncoderEngine:
    """The engine that the settings name, not started.

    Args:
        staging: The arena's staging folder of this worker.
    """
    return _MAKERS[settings.engine](settings, staging)


def _vllm(settings: EncoderSettings, staging: Path) -> EncoderEngine:
    from epd_vllm.encoder_engine import VllmEncoderEngine
    from epd_vllm.engine import EngineOptions

    return VllmEncoderEngine(
        EngineOptions(
            model=settings.model,
            served=settings.model_name,
            revision=settings.revision,
            max_batch=settings.encoder_slots,
            extra_arguments=settings.engine_args,
            log_stats=settings.metrics_port > 0,
        ),
        staging=staging,
    )


def _sim(settings: EncoderSettings, staging: Path) -> EncoderEngine:
    from epd_sim.encoder_engine import SimEncoderEngine

    return SimEncoderEngine(settings.sim_options(), staging=staging)


_MAKERS = {"vllm": _vllm, "sim": _sim}
