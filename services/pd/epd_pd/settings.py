"""Settings of a PD worker."""

from __future__ import annotations

from pydantic import Field

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
    encode_attempts: int = Field(
        3, ge=1, description="Times an item is ordered again when its embedding fails or is lost."
    )
    recheck_s: float = Field(
        1.0, gt=0, description="Seconds between looks at the state of an item that is waited for."
    )
