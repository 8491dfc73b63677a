"""A server that behaves like ``vllm serve`` towards vLLM's example proxy, on a simulated engine.

python -m bench.baseline.sim_server --role encoder|pd|colocated --arena FOLDER --name NAME --port-file FILE
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from bench.baseline.roles import EncoderRole, Encoding, PdRole, first_part, status_of
from epd_common.errors import EpdError
from epd_common.store import Arena
from epd_sim.encoder_engine import SimEncoderEngine
from epd_sim.engine import SimOptions
from epd_sim.faults import FaultPlan
from epd_sim.pd_engine import SimPdEngine
from epd_sim.profiles import PROFILES, profile_named
from epd_sim.replies import JSON_TYPE, error_body

ROLES = ("encoder", "pd", "colocated")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--role", choices=ROLES, required=True)
    parser.add_argument("--arena", type=Path, required=True, help="folder on tmpfs that all share")
    parser.add_argument("--arena-bytes", type=int, default=2 << 30)
    parser.add_argument("--name", required=True)
    parser.add_argument("--port-file", type=Path, required=True, help="the port is written there")
    parser.add_argument("--model", default="sim")
    parser.add_argument("--profile", choices=PROFILES, default="qwen2.5-vl-7b-h100")
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--slow-factor", type=float, default=1.0)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--no-decode", dest="decodes", action="store_false")
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        config = uvicorn.Config(
            make_app(arguments),
            loop="uvloop",
            http="httptools",
            log_level="warning",
            access_log=False,
        )
        temporary = arguments.port_file.with_suffix(".tmp")
        temporary.write_text(str(listener.getsockname()[1]))
        os.replace(temporary, arguments.port_file)
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def make_app(arguments: argparse.Namespace) -> FastAPI:
    """The application of a role."""
    options = SimOptions(
        served=arguments.model,
        profile=dataclasses.replace(
            profile_named(arguments.profile), time_scale=arguments.time_scale
        ),
        plan=FaultPlan(slow_factor=arguments.slow_factor),
    )
    arena = Arena(arguments.arena, quota_bytes=arguments.arena_bytes, worker=arguments.name)
    counts: Counter[str] = Counter()
    roles: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        arena.open()
        if arguments.role == "encoder":
            engine: SimEncoderEngine | SimPdEngine = SimEncoderEngine(
                options, staging=arena.staging
            )
            encoding = Encoding(engine, arena, options.profile, counts, arguments.decodes)
            roles["encoder"] = EncoderRole(encoding, arguments.model)
        else:
            encodes = arguments.role == "colocated"
            engine = SimPdEngine(
                options,
                arena=arena,
                max_num_seqs=arguments.max_num_seqs,
                encode="always" if encodes else "never",
            )
            encoding = Encoding(engine, arena, options.profile, counts, arguments.decodes)
            roles["pd"] = PdRole(engine, arena, encoding if encodes else None)
        await engine.start(lambda phase: None)
        try:
            yield
        finally:
            await engine.stop()
            arena.close()

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        try:
            if arguments.role == "encoder":
                answer = await roles["encoder"].answer(body)
                return Response(msgspec.json.encode(answer), media_type=JSON_TYPE)
            request_id = request.headers.get("x-request-id", "none")
            head, pieces = await first_part(roles["pd"].answer(request_id, body))
        except EpdError as error:
            refusal = error_body(status_of(error), error.message)
            return Response(refusal, status_of(error), media_type=JSON_TYPE)
        return StreamingResponse(pieces, head.status, media_type=head.content_type)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": arguments.model, "object": "model"}]}

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/counts")
    async def tell_counts() -> dict[str, int]:
        return dict(counts)

    return app


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(main())
