"""NATS and Valkey: do they answer, and are they set up as this system needs them?"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

import nats.errors

from epd_cli.checks.finding import Finding, size
from epd_cli.nats_users import NATS_ROLES
from epd_common.bus import Bus
from epd_common.bus.streams import OLDEST_SERVER, STREAMS
from epd_common.errors import EpdError
from epd_common.login import nats_servers
from epd_common.protocol.subjects import inbox_prefix
from epd_common.settings import CommonSettings
from epd_common.store import open_redis
from epd_common.store.redis_client import address, redis_errors

WHOLE_PAYLOAD_BYTES = 1 << 20
"""NATS's own default; media of direct jobs travel inline up to 512 KiB."""

OLDEST_REDIS = (7, 0)
"""The first whose users have rights by key and command together (``deploy/valkey/users.conf``)."""

SKEW_S = 0.5
"""Clocks may differ by so much: deadlines are times of day, and the shortest that make sense are seconds."""

_ASK_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class NatsFacts:
    """What a server says of itself.

    Attributes:
        clock_s: Its clock less this machine's, in seconds; None where it did not say.
    """

    version: tuple[int, ...]
    jetstream: bool
    max_payload_bytes: int
    clock_s: float | None = None


@dataclass(frozen=True, slots=True)
class ValkeyFacts:
    """What the server says of itself.

    Attributes:
        maxmemory_bytes: 0: no bound.
        clock_s: Its clock less this machine's, in seconds.
    """

    name: str
    version: tuple[int, ...]
    maxmemory_bytes: int
    used_bytes: int
    policy: str
    clock_s: float


def nats_server(where: str, facts: NatsFacts | EpdError) -> list[Finding]:
    """Version and settings of NATS."""
    if isinstance(facts, EpdError):
        advice = (
            "start it, or set EPD_NATS_URL (--nats) to where it runs, with its user and password"
        )
        return [Finding("NATS", "wrong", facts.message, advice)]
    said = f"version {_dotted(facts.version)} at {where}"
    found = []
    if facts.version[:2] < OLDEST_SERVER:
        advice = f"use NATS {_dotted(OLDEST_SERVER)} or later"
        found.append(Finding("NATS", "wrong", said, advice))
    else:
        found.append(Finding("NATS", "ok", said))
    if facts.jetstream:
        found.append(Finding("JetStream", "ok", "on"))
    else:
        advice = "put `jetstream { store_dir: ... }` into the server's configuration, or start it with -js"
        found.append(Finding("JetStream", "wrong", "off: there are no queues without it", advice))
    payload = size(facts.max_payload_bytes)
    if facts.max_payload_bytes < WHOLE_PAYLOAD_BYTES:
        advice = "set max_payload: 1MB in the server's configuration"
        found.append(
            Finding(
                "max_payload", "wrong", f"{payload}: jobs with inline media are refused", advice
            )
        )
    else:
        found.append(Finding("max_payload", "ok", payload))
    return found


def valkey_server(where: str, facts: ValkeyFacts | EpdError) -> list[Finding]:
    """Version and settings of Valkey or Redis."""
    if isinstance(facts, EpdError):
        advice = (
            "start it, or set EPD_REDIS_URL (--redis) to where it runs, with its user and password"
        )
        return [Finding("Valkey", "wrong", facts.message, advice)]
    said = f"{facts.name} {_dotted(facts.version)} at {where}"
    found = [Finding("Valkey", "ok", said)]
    if facts.name == "Redis" and facts.version[:2] < OLDEST_REDIS:
        advice = f"use Valkey, or Redis {_dotted(OLDEST_REDIS)} or later"
        found = [Finding("Valkey", "note", said, advice)]
    used = f"{size(facts.used_bytes)} used"
    if not facts.maxmemory_bytes:
        found.append(
            Finding(
                "maxmemory",
                "note",
                f"no bound, {used}: media and embeddings may fill the machine",
                "set maxmemory, for EPD_MEDIA_TTL_S of your picture traffic",
            )
        )
    elif facts.policy != "noeviction":
        found.append(
            Finding(
                "maxmemory",
                "wrong",
                f"{size(facts.maxmemory_bytes)}, {used}, policy {facts.policy}: what requests wait for is "
                "lost without a word",
                "set maxmemory-policy noeviction",
            )
        )
    elif facts.used_bytes > 0.9 * facts.maxmemory_bytes:
        found.append(
            Finding(
                "maxmemory",
                "note",
                f"{size(facts.maxmemory_bytes)}, {used}: nearly full, and then pictures are refused (503)",
                "raise maxmemory, or shorten EPD_MEDIA_TTL_S and EPD_EMBEDDING_TTL_S",
            )
        )
    else:
        said = f"{size(facts.maxmemory_bytes)}, {used}, noeviction"
        found.append(Finding("maxmemory", "ok", said))
    return found


def clock(server: str, skew_s: float | None) -> Finding:
    """Whether a server's clock agrees with this machine's."""
    name = f"clock of {server}"
    if skew_s is None:
        return Finding(name, "note", "not known: it has no streams yet, or does not tell this user")
    if abs(skew_s) <= SKEW_S:
        return Finding(name, "ok", f"within {SKEW_S:g} s of this machine's")
    how = "ahead of" if skew_s > 0 else "behind"
    return Finding(
        name,
        "wrong",
        f"{abs(skew_s):.1f} s {how} this machine's: deadlines are met too early or too late",
        "set both by NTP (chrony, systemd-timesyncd)",
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# -- facts ------------------------------------------------------------------------------------------


async def ask_nats(settings: CommonSettings) -> NatsFacts | EpdError:
    """Connect as the URL's user and look, with no more rights than a role's own."""
    bus = Bus(
        settings.nats_url,
        name="epd doctor",
        login=settings.nats_login(),
        inbox=_inbox(settings.nats_url),
    )
    try:
        async with bus:
            version = bus.client.connected_server_version
            return NatsFacts(
                (version.major, version.minor, version.patch),
                bool(bus.client._server_info.get("jetstream")),
                int(bus.client.max_payload),
                await _nats_clock(bus),
            )
    except EpdError as error:
        return error


def _inbox(url: str) -> str:
    """Where the URL's user may be answered."""
    user = urlsplit(nats_servers(url)[0]).username or ""
    if user == "client":
        return "_INBOX.client"
    return inbox_prefix(user if user in NATS_ROLES else "operator")


async def _nats_clock(bus: Bus) -> float | None:
    """Seconds that the server's clock is ahead, to about the half of the way there and back."""
    for stream in STREAMS.values():
        started, clock_then = time.monotonic(), time.time()
        try:
            reply = await bus.client.request(
                f"$JS.API.STREAM.INFO.{stream}", b"", timeout=_ASK_TIMEOUT_S
            )
        except (nats.errors.Error, TimeoutError):
            return None
        took_s = time.monotonic() - started
        told = json.loads(reply.data).get("ts")
        if told:
            seconds, _, fraction = str(told).removesuffix("Z").partition(".")
            there = datetime.fromisoformat(f"{seconds}.{fraction[:6]:0<6}+00:00").timestamp()
            return there - (clock_then + took_s / 2)
    return None


async def ask_valkey(settings: CommonSettings) -> ValkeyFacts | EpdError:
    """Connect and look."""
    try:
        async with open_redis(
            settings.redis_url, ca=settings.redis_ca, password_file=settings.redis_password_file
        ) as redis:
            with redis_errors():
                info = await redis.info()
                started, clock_then = time.monotonic(), time.time()
                seconds, micros = await redis.time()
                took_s = time.monotonic() - started
    except EpdError as error:
        return error
    version = info.get("valkey_version")
    shown = str(version or info.get("redis_version") or "0")
    return ValkeyFacts(
        "Valkey" if version else "Redis",
        tuple(int(part) for part in shown.split(".") if part.isdigit()),
        int(info.get("maxmemory", 0)),
        int(info.get("used_memory", 0)),
        str(info.get("maxmemory_policy", "noeviction")),
        seconds + micros / 1e6 - (clock_then + took_s / 2),
    )


def nats_address(urls: str) -> str:
    """Where URLs point, without credentials."""
    return Bus(urls, name="").address


def valkey_address(url: str) -> str:
    """The same of Valkey's."""
    return address(url)
