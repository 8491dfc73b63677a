"""How a service's process ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from epd_common.lifecycle import EXIT_FAILED

BOUND_S = 30.0

PROGRAM = """
import asyncio, sys, threading
from epd_common import lifecycle
from epd_common.settings import CommonSettings

lifecycle.EXIT_S = 0.2
sys.argv = ["service"]

async def serve(settings, stop):
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)

sys.exit(lifecycle.run_service(CommonSettings, serve))
"""


async def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    """As one in an engine's native code: the event loop waits for it without end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(BOUND_S):
            assert await process.wait() == EXIT_FAILED
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
