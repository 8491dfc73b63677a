"""Settings of an encoder."""

from __future__ import annotations

from pydantic import Field

from epd_common.settings import WorkerSettings


class EncoderSettings(WorkerSettings):
    """Environment of ``epd-encoder``."""

    encoder_slots: int = Field(
        16, ge=1, description="Encode jobs in work at once; the engine batches them in its steps."
    )
