"""Settings of an encoder."""

from __future__ import annotations

from epd_common.settings import EncodeSettings, WorkerSettings


class EncoderSettings(WorkerSettings, EncodeSettings):
    """Environment of ``epd-encoder``."""
