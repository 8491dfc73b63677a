"""What engines of role prefill and decode need to move keys and values."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from epd_common.store import Arena
from epd_pd.engines import make_engine
from epd_pd.settings import PdSettings
from epd_vllm.kv_transfer import KvOptions, check_nixl, prepare_kv_environment
from epd_vllm.launch import EngineStartError

PREFILL = KvOptions(role="prefill", host="127.0.0.1", port=0, lease_s=30)


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)


def test_the_extra_brings_nixl() -> None:
    check_nixl(PREFILL, "")


@pytest.mark.usefixtures("without_nixl")
def test_an_operator_s_own_connector_needs_no_nixl() -> None:
    check_nixl(PREFILL, "--kv-transfer-config '{}'")


@pytest.mark.parametrize(
    ("host", "is_cpu", "devices"),
    [
        ("127.0.0.1", True, "lo"),
        ("localhost", True, "lo"),
        ("::1", True, "lo"),
        ("10.1.2.3", True, None),
        ("3f2a", True, None),
        ("127.0.0.1", False, None),
    ],
)
def test_who_is_for_its_own_machine_listens_there_alone(
    host: str, is_cpu: bool, devices: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs the network's adapters also move data between devices of one machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    monkeypatch.setattr(os, "environ", kept)
    prepare_kv_environment(dataclasses.replace(PREFILL, host=host, port=5600), is_cpu=is_cpu)
    assert kept.get("UCX_NET_DEVICES") == devices
    assert kept["VLLM_NIXL_SIDE_CHANNEL_HOST"] == host
    kept |= {"UCX_NET_DEVICES": "eth1", "UCX_TLS": "tcp"}
    prepare_kv_environment(PREFILL, is_cpu=True)
    assert (kept["UCX_NET_DEVICES"], kept["UCX_TLS"]) == ("eth1", "tcp")  # the operator's stay


@pytest.mark.slow  # it imports vLLM
@pytest.mark.usefixtures("without_nixl")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_nixl_a_worker_says_which_extra_it_needs(role: str, tmp_path: Path) -> None:
    settings = PdSettings(engine="vllm", model=str(tmp_path), pd_role=role)
    arena = Arena(tmp_path / "arena", worker="pd-1", quota_bytes=1 << 20)
    engine = make_engine(settings, arena)
    with pytest.raises(EngineStartError, match=rf"EPD_PD_ROLE={role} .* extra `nixl`") as refused:
        await engine.start(lambda phase: None)
    assert refused.value.code == "nixl_missing"
