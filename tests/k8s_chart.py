"""The Helm chart, rendered by Helm's own library, and what its objects say."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from k8s_policies import Object, Pod, selects

K8S = Path(__file__).parents[1] / "deploy" / "k8s"
CHART = K8S / "epdflow"
EXAMPLES = sorted(path.stem for path in (K8S / "values").glob("*.yaml"))
RELEASE, NAMESPACE = "epd", "serving"

EVERYTHING: Object = {
    "imagePullSecrets": ["registry"],
    "env": {"EPD_LOG_LEVEL": "debug"},
    "brokers": {
        "nats": {"scheme": "tls", "caSecret": "brokers-ca"},
        "valkey": {"scheme": "rediss", "caSecret": "brokers-ca"},
    },
    "gateway": {
        "preStopS": 5,
        "apiKeysSecret": "api-keys",
        "autoscaling": {"enabled": True},
        "ingress": {
            "enabled": True,
            "host": "models.example.com",
            "className": "x",
            "tlsSecret": "t",
        },
    },
    "arena": {"kind": "node", "bytes": 9007199254740991},
    "models": {"other": {"source": "org/Model 1.5-é", "hub": {"tokenSecret": "hub"}}},
    "pools": {
        "a": {"containers": {"encoder": None}, "scaling": {"enabled": True, "min": 2}},
        "taken-out": None,
        "eighteen-letters-x": {
            "model": "other",
            "maxSurge": 0,
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "podAnnotations": {"a": "b"},
            "scaling": {"enabled": True, "queueAgeS": {"encoder": 0.5, "pd": 30}},
            "containers": {
                "encoder": {"env": {"EPD_ENCODER_SLOTS": "8"}},
                "pd": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
            },
        },
    },
    "scaling": {"prometheus": {"url": "http://prometheus:9090", "matchers": 'namespace="serving"'}},
    "metrics": {
        "serviceMonitor": True,
        "podMonitor": True,
        "rules": True,
        "labels": {"release": "prometheus"},
    },
    "networkPolicy": {
        "gatewayEgress": [{"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}], "ports": [{"port": 80}]}],
        "workerEgress": [{"to": [{"podSelector": {}}], "ports": [{"port": 9999}]}],
    },
    "traces": {"endpoint": "http://collector.monitoring:4318", "sample": 0.25},
}
"""Values that turn on all there is."""


def example(name: str) -> Object:
    """The values of one of the examples, or of ``everything`` or ``defaults``."""
    if name == "everything":
        return EVERYTHING
    if name == "defaults":
        return {}
    values: Object = yaml.safe_load((K8S / "values" / f"{name}.yaml").read_text())
    return values


NAMES = ["defaults", *EXAMPLES, "everything"]


def every(*names: str) -> pytest.MarkDecorator:
    """Run a test with these values of the chart, or with all."""
    return pytest.mark.parametrize("values", names or NAMES)


def render(values: Object, *, release: str = RELEASE) -> list[Object]:
    """The chart's objects.

    Raises:
        helm_python.HelmError: Helm refuses the values or the templates.
    """
    return json.loads(_rendered(json.dumps(values), release))  # type: ignore[no-any-return]


@functools.cache
def _rendered(values: str, release: str) -> str:
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(json.loads(values))
        files = chart.render(json.loads(values), name=release, namespace=NAMESPACE)
    objects = []
    for name, text in files.items():
        if name.endswith(".yaml"):
            objects += [found for found in yaml.safe_load_all(text) if found is not None]
    return json.dumps(objects)


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def containers(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Each container that stays, with its Deployment."""
    for deployment in of_kind(objects, "Deployment"):
        for container in pod_spec(deployment)["containers"]:
            yield deployment, container


def pod_spec(deployment: Object) -> Object:
    spec: Object = deployment["spec"]["template"]["spec"]
    return spec


def pod_of(deployment: Object) -> Pod:
    """A pod as NetworkPolicies see it."""
    ports = {
        port["name"]: port["containerPort"]
        for container in pod_spec(deployment)["containers"]
        for port in container["ports"]
    }
    return Pod(deployment["spec"]["template"]["metadata"]["labels"], NAMESPACE, ports)


def selected(objects: list[Object], selector: Object) -> set[str]:
    """Names of the Deployments whose pods a selector fits."""
    return {
        deployment["metadata"]["name"]
        for deployment in of_kind(objects, "Deployment")
        if selects(selector, deployment["spec"]["template"]["metadata"]["labels"])
    }


def environment(container: Object, secrets: Mapping[str, str] | None = None) -> dict[str, str]:
    """A container's variables as its process sees them, with names for what the cluster knows.

    ``$(NAME)`` stands for a variable that comes earlier in the list, as Kubernetes has it.

    Args:
        secrets: Values of Secrets' keys; else a key's value is its name with ``-`` for ``_``.
    """
    known = secrets or {}
    found: dict[str, str] = {}
    for variable in container["env"]:
        value = variable.get("value")
        if value is None:
            source: dict[str, Any] = variable["valueFrom"]
            if "secretKeyRef" in source:
                key = source["secretKeyRef"]["key"]
                value = known.get(key, key.replace("_", "-"))
            else:
                value = source["fieldRef"]["fieldPath"].replace(".", "-")
        found[variable["name"]] = re.sub(
            r"\$\((\w+)\)", lambda named: found.get(named[1], named[0]), value
        )
    return found
