"""A plain vLLM server: the same model and arguments in one process, with its encoders.

    python colocated.py MODEL NAME PORT_FILE [ENGINE_ARGUMENT ...]

What it answers is what epdflow's answers are compared with. An engine argument given here replaces
the one below, such as --limit-mm-per-prompt.
"""

from __future__ import annotations

import asyncio
import shlex
import socket
import sys
from pathlib import Path

import uvicorn

from epd_vllm.launch import engine_arguments, launch
from epd_vllm.openai_app import OpenAIApp

LIMITS = '{"image": 64, "video": 8, "audio": 8}'
"""A modality that the model lacks may stand here."""


async def main(model: str, name: str, port_file: Path, extra: list[str]) -> None:
    role = {
        "--model": model,
        "--served-model-name": name,
        "--max-num-seqs": "16",
        "--disable-log-stats": None,
        "--limit-mm-per-prompt": LIMITS,
    }
    arguments = engine_arguments(role=role, extra=shlex.join(extra))
    engine, parsed = await launch(arguments, lambda phase: print(phase, flush=True))
    app = await OpenAIApp.build(engine, parsed)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        await asyncio.to_thread(port_file.write_text, str(listening.getsockname()[1]))
        server = uvicorn.Server(
            uvicorn.Config(app.application, log_level="warning", lifespan="off")
        )
        await server.serve(sockets=[listening])
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:]))
