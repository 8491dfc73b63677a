"""Writes the documents that are generated from code, or with ``--check`` says which are out of date.

python scripts/write_docs.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic_core import PydanticUndefined

from epd_cli import nats_users, valkey_users
from epd_common.settings import PREFIX, CommonSettings
from epd_encoder.settings import EncoderSettings
from epd_gateway.openapi import openapi_document
from epd_gateway.settings import GatewaySettings
from epd_pd.settings import PdSettings

ROOT = Path(__file__).resolve().parents[1]
SERVICES: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "encoder": EncoderSettings,
    "pd": PdSettings,
}
COMPUTED = {"node": "host name", "worker_id": "random"}
"""Defaults that differ from machine to machine or from run to run."""

CONFIGURATION_HEAD = """\
# Configuration

Every setting is an environment variable. A value that cannot be used stops the service at its start, with
the variable, the value and what is allowed. This table is generated from the settings classes by
`scripts/write_docs.py`.

| variable | services | default | meaning |
| --- | --- | --- | --- |
"""


def configuration() -> str:
    """The table of settings, those of all services first."""
    users: dict[str, list[str]] = {}
    for service, cls in SERVICES.items():
        for name in cls.model_fields:
            users.setdefault(name, []).append(service)
    rows = []
    for name, services in sorted(users.items(), key=lambda entry: (-len(entry[1]), entry[0])):
        field = SERVICES[services[0]].model_fields[name]
        shown = "all" if len(services) == len(SERVICES) else ", ".join(services)
        rows.append(
            f"| `{PREFIX}{name.upper()}` | {shown} | {_default(name, field.default)} | "
            f"{field.description} |"
        )
    return CONFIGURATION_HEAD + "\n".join(rows) + "\n"


def _default(name: str, value: object) -> str:
    if name in COMPUTED:
        return COMPUTED[name]
    if value is PydanticUndefined:
        return "(required)"
    if value is None:
        return "empty"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"`{value}`" if value != "" else "empty"


def openapi() -> str:
    """The gateway's OpenAPI document."""
    return json.dumps(openapi_document(), indent=2) + "\n"


DOCUMENTS = {
    "docs/openapi.json": openapi,
    "docs/configuration.md": configuration,
    "deploy/nats/users.conf": nats_users.users_file,
    "deploy/valkey/users.conf": valkey_users.users_file,
}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = 0
    for name, make in DOCUMENTS.items():
        path = ROOT / name
        text = make()
        if path.exists() and path.read_text() == text:
            continue
        if check:
            print(f"{name} is out of date: run python scripts/write_docs.py")
            stale = 1
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {name}")
    return stale


if __name__ == "__main__":
    sys.exit(main())
