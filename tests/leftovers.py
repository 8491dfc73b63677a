"""What requests have left behind in the services of a simulated stack."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from epd_common.protocol import GenerateJob, decode, subjects
from epd_common.protocol.subjects import model_token
from service_stack import ServiceStack
from sim_stack import SimStack


async def queued(stack: ServiceStack, stage: str) -> int:
    """Jobs of the stack's model in a queue, those included that somebody works on."""
    streams = {"encode": subjects.ENCODE_STREAM, "generate": subjects.GENERATE_STREAM}
    wanted = f"epd.v1.{stage}.{model_token(stack.model)}.>"
    info = await stack.bus.js.stream_info(streams[stage], subjects_filter=wanted)
    return sum((info.state.subjects or {}).values())


async def request_ids(stack: SimStack) -> list[str]:
    """Of the requests in the queue, those included that somebody works on, the newest last in each lane."""
    found = []
    info = await stack.bus.js.stream_info(subjects.GENERATE_STREAM)
    for number in range(info.state.first_seq, info.state.last_seq + 1):
        try:
            raw = await stack.bus.js.get_msg(subjects.GENERATE_STREAM, number)
        except Exception as error:
            if "no message found" not in str(error):
                raise
            continue
        job = decode(raw.data or b"", GenerateJob)
        if job.model == stack.model:
            found.append(job.request_id)
    return found


async def waiting(stack: SimStack, keys: Collection[str]) -> int:
    """Marks of requests that wait for these keys."""
    pipe = stack.redis.pipeline(transaction=False)
    for key in keys:
        pipe.zcard(f"epd:v1:waiting:{key}")
    return sum(await pipe.execute())


async def leftovers(stack: SimStack, keys: Collection[str] = ()) -> dict[str, Any]:
    """What there is of requests, by where it is; what is empty is left out."""
    towers = [worker.engine._tower for worker in stack.encoders]
    metrics = (await stack.http.get("/metrics")).text
    (opened,) = [
        line for line in metrics.splitlines() if line.startswith("epd_gateway_open_requests ")
    ]
    found = {
        "generate jobs": await queued(stack, "generate"),
        "encode jobs": await queued(stack, "encode"),
        "requests in engines": sum(len(worker.engine._inside) for worker in stack.pds),
        "items in towers": sum(len(tower._waiting) + len(tower._batch) for tower in towers),
        "pins": sum(len(worker.pinned) for worker in stack.pds),
        "jobs in work": sum([await stack.busy(w) for w in (*stack.encoders, *stack.pds)]),
        "waiting marks": await waiting(stack, keys),
        "open replies": int(float(opened.split()[1])),
    }
    return {name: count for name, count in found.items() if count}
