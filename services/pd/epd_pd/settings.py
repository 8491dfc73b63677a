"""Settings of a PD worker."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from epd_common.settings import IngestSettings, WorkerSettings


class PdSettings(WorkerSettings, IngestSettings):
    """Environment of ``epd-pd``."""

    pd_slots: int = Field(
        32,
        ge=1,
        description="Generate jobs in work at once, those that wait for embeddings included.",
    )
    max_num_seqs: int = Field(
        16, ge=1, description="Sequences the engine runs at once, as vLLM's `--max-num-seqs`."
    )
    max_incomplete: int = Field(
        8,
        ge=0,
        description="Requests inside the engine that still wait for embeddings, at most; must be below "
        "`EPD_MAX_NUM_SEQS`. 0 holds requests outside until they are complete.",
    )
    sleep_when_stalled: bool = Field(
        True,
        description="Let the engine's process sleep while all its requests wait for embeddings, instead of "
        "polling every millisecond.",
    )
    encode_attempts: int = Field(
        3, ge=1, description="Times an item is ordered again when its embedding fails or is lost."
    )
    recheck_s: float = Field(
        1.0, gt=0, description="Seconds between looks at the state of an item that is waited for."
    )

    @model_validator(mode="after")
    def _leave_room_for_complete_requests(self) -> Self:
        if self.max_incomplete >= self.max_num_seqs:
            raise ValueError("EPD_MAX_INCOMPLETE must be below EPD_MAX_NUM_SEQS")
        return self
