"""Settings of a simulated engine, beside those of the worker that it is in."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from epd_common.settings import WorkerSettings
from epd_sim.engine import SimOptions
from epd_sim.faults import FaultPlan
from epd_sim.profiles import PROFILES, UnknownProfileError, profile_named

_NAMES = ", ".join(f"`{name}`" for name in PROFILES)


class SimSettings(WorkerSettings):
    """With ``EPD_ENGINE=sim``; else they have no effect."""

    sim_profile: str = Field(
        "qwen2.5-vl-7b-h100",
        description=f"Size and speed of the simulated model: {_NAMES} (no time at all).",
    )
    sim_time_scale: float = Field(
        1.0, ge=0, description="All times of the profile are multiplied by it."
    )
    sim_decode: bool = Field(
        False,
        description="Decode each picture before it is encoded, as a real engine does: for benchmarks, as it "
        "costs real CPU.",
    )
    sim_prefix_caching: bool = Field(
        True,
        description="Keep what was prefilled for prompts that begin alike, as vLLM does, up to the profile's "
        "number of tokens.",
    )
    sim_fault_workers: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Comma-separated `EPD_WORKER_ID`s of those that the faults below are for. Empty: all.",
    )
    sim_crash_at: int = Field(
        0,
        ge=0,
        description="Fault: the process ends at its Nth encode, or a PD engine's Nth step; 0 is never.",
    )
    sim_die_at: int = Field(
        0, ge=0, description="Fault: the engine dies there, and its process lives; 0 is never."
    )
    sim_hang_at: int = Field(
        0,
        ge=0,
        description="Fault: the engine hangs from there on, and looks alive; 0 is never.",
    )
    sim_slow_factor: float = Field(
        1.0, gt=0, description="Fault: everything takes so many times as long."
    )
    sim_nan_every: int = Field(
        0, ge=0, description="Fault: every Nth encode gives NaN; 0 is never, 1 always."
    )
    sim_wrong_rows_every: int = Field(
        0,
        ge=0,
        description="Fault: every Nth encode gives a row more than it says; 0 is never, 1 always.",
    )

    @field_validator("sim_fault_workers", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("sim_profile")
    @classmethod
    def _there(cls, value: str) -> str:
        try:
            return profile_named(value).name
        except UnknownProfileError as error:
            raise ValueError(error.message) from error

    def sim_options(self) -> SimOptions:
        """The options of this worker's engine."""
        scale = self.sim_time_scale
        return SimOptions(
            served=self.model_name,
            revision=self.revision,
            decodes=self.sim_decode,
            prefix_caching=self.sim_prefix_caching,
            profile=dataclasses.replace(profile_named(self.sim_profile), time_scale=scale),
            plan=self._fault_plan(),
        )

    def _fault_plan(self) -> FaultPlan:
        if self.sim_fault_workers and self.worker_id not in self.sim_fault_workers:
            return FaultPlan()
        return FaultPlan(
            crash_at=self.sim_crash_at,
            die_at=self.sim_die_at,
            hang_at=self.sim_hang_at,
            slow_factor=self.sim_slow_factor,
            nan_every=self.sim_nan_every,
            wrong_rows_every=self.sim_wrong_rows_every,
        )
