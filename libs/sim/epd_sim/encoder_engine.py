"""The simulated encoder engine: towers and nothing else."""

from __future__ import annotations

from epd_sim.engine import SimEngine


class SimEncoderEngine(SimEngine):
    """Turns media into embeddings."""
