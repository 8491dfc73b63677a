"""The command line of a real vLLM server behind vLLM's example proxy, with vLLM's own connector for files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from epd_vllm.launch import engine_arguments

START_S = 420.0

_ROLES: dict[str, tuple[str, dict[str, str | None]]] = {
    "encoder": ("ec_producer", {"--no-enable-prefix-caching": None}),
    "pd": ("ec_consumer", {"--enable-mm-embeds": None}),
    "colocated": ("", {}),
}


def serve_command(
    model: str, role: str, *, name: str, files: Path, port: int, max_num_seqs: int
) -> list[str]:
    """What starts a server; everything that does not depend on the role is as the services here have it.

    Args:
        name: That the server answers to.
        files: Where the connector keeps embeddings.
    """
    ec_role, options = _ROLES[role]
    arguments = engine_arguments(
        role={
            **options,
            "--served-model-name": name,
            "--max-num-seqs": str(max_num_seqs),
            "--host": "127.0.0.1",
            "--port": str(port),
            "--enable-request-id-headers": None,
            "--disable-uvicorn-access-log": None,
        },
        extra="",
    )
    if ec_role:
        transfer = {
            "ec_connector": "ECExampleConnector",
            "ec_role": ec_role,
            "ec_connector_extra_config": {"shared_storage_path": str(files)},
        }
        arguments += ["--ec-transfer-config", json.dumps(transfer)]
    return [sys.executable, "-m", "epd_vllm.serve", model, *arguments]
