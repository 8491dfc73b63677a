"""The pods of the Helm chart: whether they fit the services, and the arena that these share."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import helm_python
import pytest

from certificates import certificate
from epd_common.settings import CommonSettings, load_settings
from epd_encoder.settings import EncoderSettings
from epd_gateway.openapi import openapi_document
from epd_gateway.settings import GatewaySettings
from epd_pd.settings import PdSettings
from k8s_chart import (
    EVERYTHING,
    EXAMPLES,
    K8S,
    containers,
    environment,
    every,
    example,
    of_kind,
    pod_spec,
    render,
)
from k8s_policies import Object

ROOT = K8S.parents[1]
SETTINGS: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "encoder": EncoderSettings,
    "pd": PdSettings,
}
USER = 10001


@every()
def test_each_variable_is_a_setting_with_a_value_that_its_service_takes(
    values: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(f"sha256:{'0' * 64} tenant=a\n")
    certificate(tmp_path, "broker")
    for _, container in containers(render(example(values))):
        settings = SETTINGS[container["name"]]
        found = environment(container)
        ours = {name for name in found if name.startswith("EPD_")}
        assert ours <= {f"EPD_{name.upper()}" for name in settings.model_fields}
        with monkeypatch.context() as patch:
            for name, value in found.items():
                value = value.replace("/etc/epdflow/api-keys", str(tmp_path))
                patch.setenv(name, re.sub(r"/etc/epdflow/.*/ca\.crt", f"{tmp_path}/ca.pem", value))
            loaded = load_settings(settings)
        assert loaded.nats_url.count(f"://{container['name']}:EPD-NATS-") >= 1
        assert loaded.redis_url.split("://")[1].startswith(f"{container['name']}:EPD-REDIS-")
        assert loaded.worker_id.startswith("metadata-name")


@every()
def test_all_workers_of_a_release_agree_on_what_must_be_alike(values: str) -> None:
    found = [environment(container) for _, container in containers(render(example(values)))]
    workers = [variables for variables in found if "EPD_STORES" in variables]
    for name in ("EPD_STORES", "EPD_ARENA_BYTES", "EPD_ARENA_DIR", "EPD_NATS_REPLICAS"):
        assert len({variables[name] for variables in workers}) == 1
    assert workers[0]["EPD_ARENA_BYTES"].isdigit()
    assert {variables["EPD_DRAIN_S"] for variables in found} == {found[0]["EPD_DRAIN_S"]}


@every()
def test_each_pod_has_its_own_role_s_passwords_alone(values: str) -> None:
    objects = render(example(values))
    assert not of_kind(objects, "Secret")
    for deployment in of_kind(objects, "Deployment"):
        for container in pod_spec(deployment)["containers"]:
            secrets = [
                variable["valueFrom"]["secretKeyRef"]
                for variable in container["env"]
                if "secretKeyRef" in variable.get("valueFrom", {})
            ]
            brokers = {secret["key"] for secret in secrets if secret["key"] != "token"}
            role = container["name"].upper()
            assert brokers == {f"EPD_NATS_{role}_PASSWORD", f"EPD_REDIS_{role}_PASSWORD"}
            assert {secret["name"] for secret in secrets} <= {
                "epdflow-nats",
                "epdflow-valkey",
                "hub",
            }
        wholes = [volume for volume in pod_spec(deployment)["volumes"] if "secret" in volume]
        names = {volume["secret"]["secretName"] for volume in wholes}
        assert names <= {"api-keys", "epdflow-api-keys", "brokers-ca"}


@every()
def test_a_pod_is_killed_only_after_its_process_has_had_its_time(values: str) -> None:
    """EPD_DRAIN_S, EPD_DRAIN_NOTICE_S and 30 s: docs/operations.md, on stopping."""
    for deployment, container in containers(render(example(values))):
        variables = environment(container)
        needed_s = float(variables["EPD_DRAIN_S"]) + 30
        needed_s += float(variables.get("EPD_DRAIN_NOTICE_S", 0))
        for word in (
            container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        ):
            needed_s += float(word) if word.isdigit() else 0
        assert pod_spec(deployment)["terminationGracePeriodSeconds"] >= needed_s


@every()
def test_probes_and_commands_are_those_of_the_services(values: str) -> None:
    programs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    paths = openapi_document()["paths"]
    for _, container in containers(render(example(values))):
        assert container["command"] == [f"epd-{container['name']}"]
        assert container["command"][0] in programs
        ports = {port["name"] for port in container["ports"]}
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(name)
            if probe is None:  # a worker's: it would end all workers when NATS is away
                assert name == "livenessProbe" and container["name"] != "gateway"
            elif "httpGet" in probe:
                assert probe["httpGet"]["path"] in paths and probe["httpGet"]["port"] in ports
                assert probe["httpGet"]["path"] == (
                    "/ready" if name == "readinessProbe" else "/health"
                )
            else:
                assert probe["exec"]["command"] == [*container["command"], "--healthcheck"]


@every()
def test_nothing_runs_as_root_or_writes_where_it_need_not(values: str) -> None:
    for deployment in of_kind(render(example(values)), "Deployment"):
        spec = pod_spec(deployment)
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == USER
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False  # a Service `epd` would set EPD_PORT
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            if container["name"] == "arena":  # the one that gives the node's folder to the workers
                assert context["capabilities"]["add"] == ["CHOWN"]
            else:
                assert "add" not in context["capabilities"] and "runAsUser" not in context


def test_who_prefills_and_who_decodes_know_their_address_and_ports() -> None:
    found = {
        deployment["metadata"]["name"].rpartition("-")[2]: environment(container)
        for deployment, container in containers(render(example("prefill-decode")))
    }
    assert {name for name in found if "EPD_PD_ROLE" in found[name]} == {"prefill", "decode"}
    for role in ("prefill", "decode"):
        assert found[role]["EPD_PD_ROLE"] == role
        assert found[role]["EPD_KV_HOST"] == "status-podIP"
        assert found[role]["EPD_KV_PORT"] == "5600"  # a free one is looked for on IPv4 alone
        assert found[role]["UCX_TCP_PORT_RANGE"] == "25000-25099"
    assert not {name for name in found["encoder"] if name.startswith(("EPD_KV", "UCX", "POD_IP"))}
    plain = [environment(container) for _, container in containers(render({}))]
    assert not {name for each in plain for name in each if name.startswith(("EPD_KV", "UCX"))}


@every()
def test_who_says_to_share_an_arena_shares_a_mount(values: str) -> None:
    chosen = example(values).get("arena", {}).get("kind", "pod")
    folders = set()
    for deployment, container in containers(render(example(values))):
        if container["name"] == "gateway":
            continue
        variables = environment(container)
        [mount] = [m for m in container["volumeMounts"] if m["mountPath"].startswith("/arena")]
        assert mount == {"name": "arena", "mountPath": variables["EPD_ARENA_DIR"]}
        [volume] = [v for v in pod_spec(deployment)["volumes"] if v["name"] == "arena"]
        if chosen == "node":
            assert variables["EPD_NODE"] == "spec-nodeName"
            folders.add(volume["hostPath"]["path"])
        else:
            assert variables["EPD_NODE"] == "metadata-name"  # the pod's
            assert volume["emptyDir"]["medium"] == "Memory"
            size_bytes = int(volume["emptyDir"]["sizeLimit"])
            assert size_bytes == 2 * int(variables["EPD_ARENA_BYTES"])
    assert len(folders) == (1 if chosen == "node" else 0)
    assert all(folder.startswith("/dev/shm/") for folder in folders)


@pytest.mark.parametrize(
    "pools",
    [
        {},  # the defaults: an encoder and a PD worker, a pod each
        {"all": {"replicas": 2, "containers": {"encoder": {}, "pd": {}}}},
        {"all": {"scaling": {"enabled": True}, "containers": {"encoder": {}, "pd": {}}}},
    ],
)
def test_pods_that_share_no_arena_cannot_do_with_it_alone(pools: Object) -> None:
    arena = {"stores": "arena", "kind": "pod"}
    with pytest.raises(helm_python.HelmError, match=r"must have redis"):
        render({"arena": arena, "pools": pools})
    assert render({"arena": {**arena, "stores": "redis"}, "pools": pools})
    assert render({"arena": {**arena, "kind": "node"}, "pools": pools})
    assert render({"arena": arena, "pools": {"one": {"containers": {"encoder": {}, "pd": {}}}}})


def test_two_processes_of_one_pod_have_ids_and_ports_of_their_own() -> None:
    found = [c for _, c in containers(render(example("cpu-demo"))) if c["name"] != "gateway"]
    assert [container["name"] for container in found] == ["encoder", "pd"]
    ids, ports = (
        {environment(container)[name] for container in found}
        for name in ("EPD_WORKER_ID", "EPD_METRICS_PORT")
    )
    assert ids == {"metadata-name-e", "metadata-name-p"} and ports == {"9464", "9465"}
    assert {str(c["ports"][0]["containerPort"]) for c in found} == ports
    longest = max(len(d["metadata"]["name"]) for d in of_kind(render(EVERYTHING), "Deployment"))
    longest = max(longest, len(longest_name()))
    # Kubernetes cuts a pod's name at 63; its ReplicaSet and it add 11 and 6 to their owner's.
    assert min(longest + 17, 63) + len("-e") <= 64


def longest_name() -> str:
    objects = render({"pools": {"a" * 18: {"containers": {"pd": {}}}}}, release="r" * 53)
    return str(max((d["metadata"]["name"] for d in of_kind(objects, "Deployment")), key=len))


@pytest.mark.parametrize("name", EXAMPLES)
def test_memory_limits_hold_the_arena_and_what_a_process_takes(name: str) -> None:
    for _, container in containers(render(example(name))):
        limit = bytes_of(container["resources"]["limits"]["memory"])
        if container["name"] == "gateway":
            assert limit >= 3 << 30
        else:
            assert limit >= int(environment(container)["EPD_ARENA_BYTES"]) + (3 << 30)


def bytes_of(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Ki|Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) << {"Ki": 10, "Mi": 20, "Gi": 30}[unit]
