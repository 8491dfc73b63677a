"""What scales and watches the pods of the Helm chart, and whom its selectors select."""

from __future__ import annotations

import re

import pytest
import yaml

from epd_common.protocol import subjects
from epd_gateway.metrics import GatewayMetrics
from k8s_chart import (
    K8S,
    NAMESPACE,
    environment,
    every,
    example,
    of_kind,
    pod_of,
    pod_spec,
    render,
    selected,
)
from k8s_policies import Object, selects

ROOT = K8S.parents[1]


def expected_consumers(role: str, model: str, pd_role: str) -> set[tuple[str, str]]:
    if role == "encoder":
        return {
            (subjects.ENCODE_STREAM, subjects.encode_consumer(model, x)) for x in subjects.LANES
        }
    place = subjects.DECODE_PLACE if pd_role == "decode" else subjects.ANY_PLACE
    return {
        (subjects.GENERATE_STREAM, subjects.generate_consumer(model, x, place))
        for x in subjects.LANES
    }


@every("cluster", "everything", "prefill-decode")
def test_what_scales_a_pool_is_the_queues_of_its_model_and_roles(values: str) -> None:
    objects = render(example(values))
    deployments = {found["metadata"]["name"]: found for found in of_kind(objects, "Deployment")}
    scaled = of_kind(objects, "ScaledObject")
    assert len(scaled) == (3 if values == "prefill-decode" else 2)
    for found in scaled:
        deployment = deployments[found["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in deployment["spec"]  # or an upgrade would undo the scaling
        assert 1 <= found["spec"]["minReplicaCount"] <= found["spec"]["maxReplicaCount"]
        expected = set()
        for container in pod_spec(deployment)["containers"]:
            variables = environment(container)
            model = variables.get("EPD_SERVED_MODEL") or variables["EPD_MODEL"]
            pd_role = variables.get("EPD_PD_ROLE", "pd")
            expected |= expected_consumers(container["name"], model, pd_role)
        lags = [t["metadata"] for t in found["spec"]["triggers"] if t["type"] == "nats-jetstream"]
        assert {(lag["stream"], lag["consumer"]) for lag in lags} == expected
        assert {lag["account"] for lag in lags} == {"$G"}  # where users without an account are
        host = f"nats-headless.{NAMESPACE}.svc.cluster.local:8222"
        assert {lag["natsServerMonitoringEndpoint"] for lag in lags} == {host}


@pytest.mark.parametrize("model", ["qwen", "Qwen/Qwen2.5-VL-7B", "a b=c", "modèle.日本", "x~_-9"])
def test_a_model_s_token_is_the_one_of_the_protocol(model: str) -> None:
    pool = {"containers": {"pd": {}}, "scaling": {"enabled": True}}
    values: Object = {"models": {"default": {"source": "/model", "servedName": model}}}
    [scaled] = of_kind(render({**values, "pools": {"p": pool}}), "ScaledObject")
    found = [trigger["metadata"]["consumer"] for trigger in scaled["spec"]["triggers"]]
    assert found == [subjects.generate_consumer(model, lane) for lane in subjects.LANES]


@every("cluster", "everything")
def test_queries_ask_for_metrics_that_there_are(values: str) -> None:
    known = {}
    for metric in GatewayMetrics().registry.collect():
        known[metric.name] = metric
    queries = [
        trigger["metadata"]["query"]
        for found in of_kind(render(example(values)), "ScaledObject")
        for trigger in found["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    ]
    asked = [re.fullmatch(r"max\((\w+)\{(.*)\}\)", query) for query in queries]
    assert {found[1] for found in asked if found} == {
        "epd_gateway_queue_jobs",
        "epd_gateway_queue_oldest_seconds",
    }
    for found in asked:
        assert found is not None and found[1] in known
        labels = dict(re.findall(r'(\w+)="([^"]*)"', found[2]))
        assert labels.pop("stage") in ("encode", "generate")
        assert set(labels) <= {"model", "namespace"}


def test_without_prometheus_the_lag_alone_scales() -> None:
    pool = {"containers": {"encoder": {}}, "scaling": {"enabled": True}}
    [found] = of_kind(render({"pools": {"e": pool}}), "ScaledObject")
    assert {trigger["type"] for trigger in found["spec"]["triggers"]} == {"nats-jetstream"}


def test_prefill_and_decode_are_not_scaled_by_what_counts_both() -> None:
    values = example("prefill-decode") | {"scaling": {"prometheus": {"url": "http://prometheus"}}}
    kinds = {
        found["metadata"]["name"].rpartition("-")[2]: {t["type"] for t in found["spec"]["triggers"]}
        for found in of_kind(render(values), "ScaledObject")
    }
    assert kinds == {
        "encoder": {"nats-jetstream", "prometheus"},
        "prefill": {"nats-jetstream"},
        "decode": {"nats-jetstream"},
    }


@every()
def test_selectors_fit_the_pods_that_they_are_for_and_no_others(values: str) -> None:
    objects = render(example(values))
    names = {found["metadata"]["name"] for found in of_kind(objects, "Deployment")}
    gateway = {name for name in names if name.endswith("-gateway")}
    assert len(gateway) == 1
    for found in of_kind(objects, "Deployment", "PodDisruptionBudget"):
        assert selected(objects, found["spec"]["selector"]) == {found["metadata"]["name"]}
    assert {found["metadata"]["name"] for found in of_kind(objects, "PodDisruptionBudget")} == names
    for found in of_kind(objects, "Service"):
        assert selected(objects, {"matchLabels": found["spec"]["selector"]}) == gateway
        assert {port["targetPort"] for port in found["spec"]["ports"]} == {"http"}
    for found in of_kind(objects, "HorizontalPodAutoscaler"):
        assert {found["spec"]["scaleTargetRef"]["name"]} == gateway
    for deployment in of_kind(objects, "Deployment"):
        for spread in pod_spec(deployment)["topologySpreadConstraints"]:
            own = deployment["metadata"]["name"]
            assert selected(objects, spread["labelSelector"]) == {own}
        [account] = of_kind(objects, "ServiceAccount")
        assert pod_spec(deployment)["serviceAccountName"] == account["metadata"]["name"]


@every("cluster", "everything")
def test_prometheus_finds_the_ports_of_all(values: str) -> None:
    objects = render(example(values))
    pods = {d["metadata"]["name"]: pod_of(d) for d in of_kind(objects, "Deployment")}
    [service] = of_kind(objects, "ServiceMonitor")
    [exposed] = of_kind(objects, "Service")
    assert selects(service["spec"]["selector"], exposed["metadata"]["labels"])
    assert {end["port"] for end in service["spec"]["endpoints"]} <= {
        port["name"] for port in exposed["spec"]["ports"]
    }
    [monitor] = of_kind(objects, "PodMonitor")
    workers = {name for name in pods if not name.endswith("-gateway")}
    assert selected(objects, monitor["spec"]["selector"]) == workers
    asked = {end["port"] for end in monitor["spec"]["podMetricsEndpoints"]}
    assert asked == {port for name in workers for port in pods[name].ports}


@every("cluster", "everything")
def test_jobs_and_alerts_are_those_of_the_project_s_prometheus(values: str) -> None:
    monitoring = ROOT / "deploy" / "observability"
    scraped = yaml.safe_load((monitoring / "prometheus.yml").read_text())["scrape_configs"]
    jobs, objects = {}, render(example(values))
    for found in of_kind(objects, "ServiceMonitor", "PodMonitor"):
        for end in found["spec"].get("endpoints") or found["spec"]["podMetricsEndpoints"]:
            [label] = end["relabelings"]
            assert label["targetLabel"] == "job"
            jobs[label["replacement"]] = end["port"]
    assert set(jobs) == {scrape["job_name"] for scrape in scraped}
    assert jobs == {"gateway": "http", "encoder": "metrics-e", "pd": "metrics-p"}
    [rules] = of_kind(objects, "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((monitoring / "alerts.yml").read_text())
