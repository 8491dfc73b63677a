"""Settings of an encoder."""

from __future__ import annotations

from epd_common.settings import EncodeSettings
from epd_sim.settings import SimSettings


class EncoderSettings(SimSettings, EncodeSettings):
    """Environment of ``epd-encoder``."""
