"""Which engine a PD worker runs. Each is imported where it is chosen: the simulated one needs no vLLM."""

from __future__ import annotations

from typing import Literal

from epd_common.engines import PdEngine
from epd_common.store import Arena
from epd_pd.settings import PdSettings
from epd_sim.kv import KeptPrompts


def make_engine(settings: PdSettings, arena: Arena) -> PdEngine:
    """The engine that the settings name, not started.

    Args:
        arena: Gives the folders of this worker.
    """
    return _MAKERS[settings.engine](settings, arena)


def _vllm(settings: PdSettings, arena: Arena) -> PdEngine:
    from epd_vllm.engine import EngineOptions
    from epd_vllm.kv_transfer import KvOptions
    from epd_vllm.pd_engine import VllmPdEngine

    kv = None
    if settings.pd_role != "pd":
        kv = KvOptions(
            role=settings.pd_role,
            host=settings.kv_host,
            port=settings.kv_port,
            lease_s=settings.kv_lease_s,
        )
    return VllmPdEngine(
        EngineOptions(
            model=settings.model,
            served=settings.model_name,
            revision=settings.revision,
            max_batch=settings.max_num_seqs,
            extra_arguments=settings.engine_args,
            log_stats=settings.metrics_port > 0,
        ),
        arena=arena,
        max_items=settings.max_items,
        encode=_encode(settings),
        sleep_when_stalled=settings.sleep_when_stalled,
        kv_events=settings.kv_events and settings.pd_role != "decode",
        kv=kv,
    )


def _sim(settings: PdSettings, arena: Arena) -> PdEngine:
    from epd_sim.pd_engine import SimPdEngine

    return SimPdEngine(
        settings.sim_options(),
        arena=arena,
        max_num_seqs=settings.max_num_seqs,
        encode=_encode(settings),
        kept_prompts=kept_prompts(settings),
    )


def kept_prompts(settings: PdSettings) -> KeptPrompts | None:
    """Where a simulated engine of role prefill keeps what it hands over."""
    if settings.pd_role != "prefill":
        return None
    return KeptPrompts(host=settings.kv_host, port=settings.kv_port, lease_s=settings.kv_lease_s)


def _encode(settings: PdSettings) -> Literal["never", "loaded", "always"]:
    return "always" if settings.ec_role == "ec_both" else settings.local_encode


_MAKERS = {"vllm": _vllm, "sim": _sim}
