"""Writes the documents that are generated from code, or with ``--check`` says which are out of date.

python scripts/write_docs.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pydantic_core import PydanticUndefined

from epd_cli import dashboards, nats_users, valkey_users
from epd_common.settings import PREFIX, CommonSettings
from epd_common.telemetry.metric_set import MetricSet, Spec
from epd_common.telemetry.worker_metrics import WorkerMetrics
from epd_encoder.settings import EncoderSettings
from epd_gateway.metrics import GatewayMetrics
from epd_gateway.openapi import openapi_document
from epd_gateway.settings import GatewaySettings
from epd_pd.metrics import PdMetrics
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


METRICS_HEAD = """\
# Metrics

`GET /metrics` of the gateway, and of each encoder and PD worker on `EPD_METRICS_PORT`, in Prometheus's text
format; what to do with them is in [operations.md](operations.md#monitoring). `epd_encoder_*` has to do with
encode jobs and the making of embeddings, also where a PD worker does it, `epd_pd_*` with generate jobs,
`epd_store_*` with embeddings at rest. A worker that runs vLLM shows vLLM's own metrics beside them, `vllm:*`,
which vLLM describes. Counters begin at 0 with each process. These tables are generated from the code by
`scripts/write_docs.py`.
"""

FAMILIES = {
    "epd_gateway_": "The gateway",
    "epd_encoder_": "Encoders, and PD workers that encode",
    "epd_pd_": "PD workers",
    "epd_store_": "Stores",
}


def described() -> dict[Spec, list[str]]:
    """All metrics, with the services that show them."""
    pd = WorkerMetrics("pd")
    PdMetrics(pd)
    sets: dict[str, MetricSet] = {
        "gateway": GatewayMetrics(),
        "encoder": WorkerMetrics("encoder"),
        "pd": pd,
    }
    found: dict[Spec, list[str]] = {}
    for service, metrics in sets.items():
        for spec in metrics.specs:
            found.setdefault(spec, []).append(service)
    return found


def metrics() -> str:
    """The tables of metrics, one for each family."""
    found = described()
    text = METRICS_HEAD
    for prefix, title in FAMILIES.items():
        text += f"\n## {title}\n\n| metric | type | unit | shown by | meaning |\n"
        text += "| --- | --- | --- | --- | --- |\n"
        for spec in sorted(
            (spec for spec in found if spec.name.startswith(prefix)), key=lambda spec: spec.name
        ):
            labels = f"{{{','.join(spec.labels)}}}" if spec.labels else ""
            text += (
                f"| `{spec.name}{labels}` | {spec.kind} | {spec.unit} | {', '.join(found[spec])} | "
                f"{spec.meaning} |\n"
            )
    return text


def openapi() -> str:
    """The gateway's OpenAPI document."""
    return json.dumps(openapi_document(), indent=2) + "\n"


VALKEY_VALUES_HEAD = """\
# Values of Valkey's own chart: its users and what each may do. Their passwords are those of the Secret.
# Made from libs/cli/epd_cli/valkey_users.py by scripts/write_docs.py.
auth:
  enabled: true
  usersExistingSecret: epdflow-valkey
  aclUsers:
    default: {passwordKey: EPD_REDIS_OPERATOR_PASSWORD, permissions: "off"}
"""


def valkey_values() -> str:
    """The users of Valkey as its chart takes them."""
    users = (
        f"    {role}:\n"
        f"      passwordKey: EPD_REDIS_{role.upper()}_PASSWORD\n"
        f"      permissions: {json.dumps(' '.join(('resetchannels', valkey_users.CONNECT, *rights)))}\n"
        for role, rights in valkey_users.VALKEY_ROLES.items()
    )
    return VALKEY_VALUES_HEAD + "".join(users)


DOCUMENTS: dict[str, Callable[[], str]] = {
    "docs/openapi.json": openapi,
    "docs/configuration.md": configuration,
    "docs/metrics.md": metrics,
    "deploy/nats/users.conf": nats_users.users_file,
    "deploy/valkey/users.conf": valkey_users.users_file,
    **{
        f"deploy/observability/dashboards/{name}.json": partial(dashboards.dashboard, name)
        for name in dashboards.DASHBOARDS
    },
    # A chart has files of its own folder alone.
    "deploy/k8s/epdflow/files/nats-users.conf": nats_users.users_file,
    "deploy/k8s/epdflow/files/alerts.yml": (ROOT / "deploy/observability/alerts.yml").read_text,
    "deploy/k8s/brokers/valkey-users.yaml": valkey_values,
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
