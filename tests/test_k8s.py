"""The Helm chart: what Helm and Kubernetes' schemas say of it, and what the page on it says.

No cluster is asked. Helm's library renders the chart as `helm template` does.
"""

from __future__ import annotations

import re
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest

from k8s_chart import CHART, EVERYTHING, EXAMPLES, K8S, every, example, of_kind, render
from k8s_policies import Object
from k8s_schemas import CUSTOM

ROOT = K8S.parents[1]
KUBERNETES = ("1.28", "1.37")


@every()
def test_helm_finds_nothing_to_complain_about(values: str) -> None:
    report = helm_python.lint(CHART, example(values), strict=True)
    worse_than_hints = [found for found in report["messages"] if found["severity"] > 1]
    assert report["total_charts_linted"] == 1
    assert not report["errors"] and not worse_than_hints


@every()
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_each_object(values: str, version: str) -> None:
    objects = render(example(values))
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(names) == len(set(names)) > 5
    for found in objects:
        if found["kind"] in CUSTOM:
            jsonschema.validate(found, CUSTOM[found["kind"]])
        else:
            kubernetes_validate.validate(found, version, strict=True)


def test_objects_that_are_wrong_are_refused() -> None:
    """So that the test above says something."""
    for kind, path, value in (
        ("Deployment", ("spec", "template", "spec", "containers", 0, "livenesProbe"), {}),
        ("Deployment", ("spec", "replicas"), "2"),
        ("NetworkPolicy", ("spec", "ingress", 0, "form"), []),
    ):
        broken = of_kind(render({}), kind)[0]
        put(broken, path, value)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(broken, KUBERNETES[0], strict=True)
    scaled = of_kind(render(EVERYTHING), "ScaledObject")[0]
    scaled["spec"]["triggers"][0]["metadata"]["lagThreshold"] = 16
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(scaled, CUSTOM["ScaledObject"])


def put(found: Any, path: tuple[str | int, ...], value: object) -> None:
    for part in path[:-1]:
        found = found[part]
    found[path[-1]] = value


def with_value(path: tuple[str | int, ...], value: object) -> Object:
    values: Any = value
    for part in reversed(path):
        values = {part: values}
    return values  # type: ignore[no-any-return]


WRONG: list[tuple[tuple[str, ...], object, str]] = [
    (("arena", "kind"), "pods", "kind"),
    (("arena", "stores"), "redis,arena", "stores"),
    (("arena", "bytes"), "2Gi", "bytes"),
    (("brokers", "nats", "servers"), ["nats://nats:4222"], "servers"),
    (("brokers", "nats", "replicas"), 7, "replicas"),
    (("gateway", "repliccas"), 2, "repliccas"),
    (("gateway", "env"), {"EPD_MAX_ITEMS": 64}, "EPD_MAX_ITEMS"),
    (("pools", "Big_Ones"), {"containers": {"pd": {}}}, "Big_Ones"),
    (("pools", "gateway"), {"containers": {"pd": {}}}, "gateway"),
    (("pools", "a"), {"replicas": 2}, "containers"),
    (("pools", "a", "containers"), {}, "containers"),
    (("pools", "a", "containers"), {"decoder": {}}, "decoder"),
    (("pools", "a", "containers"), {"pd": {"role": "decoder"}}, "role"),
    (("pools", "a", "containers"), {"encoder": {"role": "decode"}}, "role"),
    (("pools", "a", "containers"), {"pd": {"role": "decode"}}, 'no pool of the model "default"'),
    (("kv", "ucxPorts"), "25000", "ucxPorts"),
    (("pools", "a"), {"containers": {"pd": {}}, "scaling": {"min": 0}}, "min"),
    (("pools", "a"), {"containers": {"pd": {}}, "model": "b"}, 'model "b"'),
    (
        ("pools", "a"),
        {"containers": {"pd": {}}, "scaling": {"enabled": True, "min": 5}},
        "scaling.min of 5",
    ),
    (("gateway", "autoscaling"), {"enabled": True, "min": 9}, "autoscaling.min of 9"),
    (("images", "gateway", "tag"), "0.1 0", "tag"),
    (("metrics", "interval"), "15", "interval"),
    (("models", "default", "servedName"), "a\nb", "servedName"),
    (("networkPolicy", "insideCidrs"), ["10.0.0.0"], "insideCidrs"),
    (("nameOverride",), "A B", "nameOverride"),
    (("fullnameOverride",), "1st", "fullnameOverride"),
]


@pytest.mark.parametrize(("path", "value", "named"), WRONG)
def test_wrong_values_are_refused_by_name(path: tuple[str, ...], value: object, named: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(named)):
        render(with_value(path, value))


def test_every_default_has_a_place_in_the_schema() -> None:
    """As the schema refuses what it does not know, a default that is not in it is no value either."""
    with helm_python.Chart.load(CHART) as chart:
        defaults, schema = chart.values, chart.schema
    assert schema is not None
    jsonschema.validate(defaults, schema)
    assert set(schema["properties"]) - {"global"} == set(defaults)


def test_the_page_on_deploying_names_files_and_values_that_exist() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text()
    files = set(
        re.findall(r"\bdeploy/(?!\.env|secrets)[\w./-]+\w", text)
    )  # not what make_env.sh makes
    assert {f"deploy/k8s/values/{name}.yaml" for name in EXAMPLES} <= files
    assert not [name for name in files if not (ROOT / name).exists()]
    with helm_python.Chart.load(CHART) as chart:
        schema = chart.schema
    assert schema is not None
    sections = "|".join(schema["properties"])
    named = set(re.findall(rf"`((?:{sections})\.[\w.]+?)[:=`]", text))
    assert len(named) > 10
    for path in named:
        found = schema
        for part in path.split("."):
            inner = found.get("properties", {})
            assert part in inner or isinstance(found["additionalProperties"], dict), path
            found = inner[part] if part in inner else found["additionalProperties"]
