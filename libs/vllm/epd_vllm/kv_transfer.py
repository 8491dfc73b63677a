"""How engines of role prefill and decode move keys and values: by NIXL, unless an operator says otherwise."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import json
import os
import socket
from dataclasses import dataclass
from typing import Literal

from epd_vllm.launch import EngineStartError

OPTION = "--kv-transfer-config"
UCX_ON_CPU = "tcp,shm,cma,self"
"""Without tcp NIXL's agents do not find each other."""
LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class KvOptions:
    """What an operator says of it.

    Attributes:
        role: Of the engine.
        host: Address at which other engines ask this one where its keys and values are.
        port: For that; 0 takes a free one.
        lease_s: So long it keeps what is handed over.
    """

    role: Literal["prefill", "decode"]
    host: str
    port: int
    lease_s: int


def check_nixl(options: KvOptions, extra: str) -> None:
    """See that NIXL is there, as vLLM says so late, in its engine's process, and not how to get it.

    It is not imported: its library takes over a process's signal handlers.

    Raises:
        EngineStartError: it is not installed.
    """
    if OPTION not in extra and importlib.util.find_spec("nixl") is None:
        raise EngineStartError(
            f"EPD_PD_ROLE={options.role} needs NIXL, which is not installed: install epdflow with its extra "
            "`nixl`, or name another connector by --kv-transfer-config in EPD_ENGINE_ARGS",
            code="nixl_missing",
        )


def kv_arguments(options: KvOptions, extra: str) -> dict[str, str | None]:
    """The engine's arguments; none where ``extra`` has a configuration of its own."""
    if OPTION in extra:
        return {}
    config = {
        "kv_connector": "QuietNixlConnector",
        "kv_connector_module_path": "epd_vllm.nixl_kv",
        "kv_role": "kv_producer" if options.role == "prefill" else "kv_consumer",
        # A request whose prompt cannot be loaded ends, and the service has it computed.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"num_threads": 1, "kv_lease_duration": options.lease_s},
    }
    return {OPTION: json.dumps(config)}


def prepare_kv_environment(options: KvOptions, *, is_cpu: bool) -> None:
    """Name the address to vLLM's connector; what the user set in the environment stays."""
    port = options.port or _free_port(options.host)
    os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", options.host)
    os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
    if is_cpu:
        os.environ.setdefault("UCX_TLS", UCX_ON_CPU)
        if _is_loopback(options.host):
            # It would listen at all addresses of the machine, for whoever reaches them.
            os.environ.setdefault("UCX_NET_DEVICES", LOOPBACK)


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _free_port(host: str) -> int:
    """A port that nobody listens on now. The engine binds it a little later, and says so if it is taken."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
