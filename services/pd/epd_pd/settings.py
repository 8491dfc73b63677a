"""Settings of a PD worker."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from epd_common.protocol.workers import PdRole
from epd_common.settings import EncodeSettings, IngestSettings
from epd_pd.handing_over import SplitPolicy
from epd_pd.rescue import RescuePolicy
from epd_sim.settings import SimSettings


class PdSettings(SimSettings, EncodeSettings, IngestSettings):
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
    prefill_wait_s: float = Field(
        3.0,
        ge=0,
        description="Seconds that a prompt of 16,384 tokens waits longer in the engine than an empty one, at "
        "most; shorter ones in proportion. 0: as they came.",
    )
    sleep_when_stalled: bool = Field(
        True,
        description="Let the engine's process sleep while all its requests wait for embeddings, instead of "
        "polling every millisecond.",
    )
    pd_role: PdRole = Field(
        "pd",
        description="`prefill` hands prompts over to workers of role `decode`, which answer; `pd` does both.",
    )
    split_tokens: int = Field(
        512,
        ge=0,
        description="Prompts of so many tokens or more are handed over by prefill workers; shorter ones are "
        "answered where they are prefilled.",
    )
    split_whole: int = Field(
        4,
        ge=0,
        description="Short prompts that a prefill worker answers itself at a time; more are handed over too.",
    )
    kv_lease_s: int = Field(
        30,
        ge=6,
        description="Seconds that a prefill worker keeps the keys and values that it handed over. A decode "
        "worker which cannot begin to answer within this, less 2, prefills the prompt itself.",
    )
    kv_host: str = Field(
        "127.0.0.1",
        description="Address at which other workers ask this one for where its keys and values are; one that "
        "they reach, where prefill and decode are on several nodes.",
    )
    kv_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port for that; 0 takes a free one. Tensor parallel engines take the following ones too.",
    )
    kv_events: bool = Field(
        True,
        description="Tell gateways which beginnings of prompts the engine's prefix cache holds, for those "
        "that place requests by them (`EPD_PLACEMENT=prefix`).",
    )
    ec_role: Literal["ec_consumer", "ec_both"] = Field(
        "ec_consumer",
        description="`ec_consumer` leaves encoding to encoders; `ec_both` takes encode jobs as well, so that "
        "one process can serve a model alone.",
    )
    local_encode: Literal["never", "loaded", "always"] = Field(
        "loaded",
        description="Whether a PD worker encodes an item itself where encoders fail: `loaded` if its engine "
        "has a vision tower anyway (`ec_both`, and models such as Qwen3-VL), `always` loads one for that.",
    )
    encode_attempts: int = Field(
        3,
        ge=1,
        description="Times an item is ordered in all for one request when its embedding fails or is lost.",
    )
    encode_patience_s: float = Field(
        20.0,
        gt=0,
        description="Seconds that encoders get for an item before a PD worker encodes it itself, if it may; "
        "well above the time that an encoder takes. At once where no encoder is ready.",
    )
    encode_deadline_s: float = Field(
        60.0,
        gt=0,
        description="Seconds an item may take in all before its request ends with 504; the request's own "
        "deadline may be sooner.",
    )
    recheck_s: float = Field(
        1.0, gt=0, description="Seconds between looks at the state of an item that is waited for."
    )

    store_patience_s: float = Field(
        5.0,
        ge=0,
        description="Seconds that a request waits for its items while Valkey does not answer this worker, in "
        "case they come to its arena, before it is given to another worker.",
    )

    @model_validator(mode="after")
    def _leave_room_for_complete_requests(self) -> Self:
        if self.max_incomplete >= self.max_num_seqs:
            raise ValueError("EPD_MAX_INCOMPLETE must be below EPD_MAX_NUM_SEQS")
        return self

    def split_policy(self) -> SplitPolicy:
        return SplitPolicy(tokens=self.split_tokens, whole=self.split_whole)

    def rescue_policy(self, *, encodes_here: bool) -> RescuePolicy:
        return RescuePolicy(
            attempts=self.encode_attempts,
            patience_s=self.encode_patience_s,
            deadline_s=self.encode_deadline_s,
            encodes_here=encodes_here,
        )
