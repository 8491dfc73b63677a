"""Fills the disk of an embedded NATS, makes room, waits until it serves; run by ``test_broker_store.py``.

Argument: an empty folder on a tmpfs of its own, 40 MiB large. Prints what became of it as one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from epd_cli.brokers import embedded_brokers
from epd_cli.stack import Stack, StackOptions
from epd_common.bus import Bus
from epd_common.bus.streams import declare_streams
from epd_common.errors import UnavailableError
from epd_common.protocol import Cancel

SUBJECT = "epd.v1.encode.m.l0"
AGAIN_WITHIN_S = 60.0


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            pass


async def main(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"said": []}
    stop = asyncio.Event()
    async with embedded_brokers(folder / "brokers", redis=False) as brokers:
        options = StackOptions(model="none", state_dir=folder)
        stack = Stack(options, brokers.nats_url, "", "", [], [], folder, [brokers.nats])
        supervising = asyncio.create_task(stack.supervise(stop, facts["said"].append))
        async with Bus(brokers.nats_url, name="test") as bus:
            await declare_streams(bus, max_jobs=100)

            async def stores() -> bool:
                job = Cancel(request_id="r", reason=os.urandom(40_000).hex())
                try:
                    await bus.store(SUBJECT, job, message_id=os.urandom(8).hex())
                except UnavailableError:
                    return False
                return True

            facts["first"] = await stores()
            pid = brokers.nats.pid
            fill(folder / "another's")
            facts["while_full"] = [await stores() for _ in range(3)]
            facts["problem"] = await brokers.nats.problem()
            await asyncio.sleep(8)  # longer than an unusable server is left alone
            facts["same_server_while_full"] = brokers.nats.pid == pid
            (folder / "another's").unlink()
            started = time.monotonic()
            while not (again := await stores()):
                if time.monotonic() - started > AGAIN_WITHIN_S:
                    break
                await asyncio.sleep(0.2)
            facts["again"] = again
            facts["kept"] = (await bus.js.stream_info("EPD_ENCODE")).state.messages
            facts["problem_at_last"] = await brokers.nats.problem()
        stop.set()
        await supervising
    return facts


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
