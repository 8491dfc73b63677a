"""Who may talk to whom, by the NetworkPolicies of the Helm chart."""

from __future__ import annotations

from k8s_chart import NAMESPACE, every, example, of_kind, pod_of, render
from k8s_policies import Address, End, Object, Pod, allowed

NATS = Pod(
    {"app.kubernetes.io/name": "nats", "app.kubernetes.io/component": "nats", "pod": "nats-0"},
    NAMESPACE,
)
OTHER_NATS = Pod({**NATS.labels, "pod": "nats-1"}, NAMESPACE)
VALKEY = Pod({"app.kubernetes.io/name": "valkey"}, NAMESPACE)
TOOLS = Pod({"epd-client": "true"}, NAMESPACE)
STRANGER = Pod({"app": "else"}, NAMESPACE)
FOREIGN = Pod({"app.kubernetes.io/name": "epdflow", "app.kubernetes.io/instance": "epd"}, "else")
PROMETHEUS, KEDA, DNS, INGRESS = (
    Pod({"app": name}, namespace)
    for name, namespace in (
        ("prometheus", "monitoring"),
        ("keda-operator", "keda"),
        ("coredns", "kube-system"),
        ("ingress", "ingress-nginx"),
    )
)
PUBLIC, PUBLIC6 = Address("93.184.215.14"), Address("2606:2800:21f::1")
METADATA, INTERNAL = Address("169.254.169.254"), Address("10.0.0.7")


def gateway_of(objects: list[Object]) -> Pod:
    [found] = [
        deployment
        for deployment in of_kind(objects, "Deployment")
        if deployment["metadata"]["name"].endswith("-gateway")
    ]
    return pod_of(found)


@every()
def test_network_policies_let_through_what_is_needed_and_no_more(values: str) -> None:
    objects = render(example(values))
    policies, gateway = policies_of(objects), gateway_of(objects)
    workers = [
        pod
        for found in of_kind(objects, "Deployment")
        if (pod := pod_of(found)).labels != gateway.labels
    ]
    needed: list[tuple[End, End, int]] = [
        (INGRESS, gateway, 8000),
        (PROMETHEUS, gateway, 8000),
        (gateway, PUBLIC, 443),
        (gateway, PUBLIC6, 443),
        (NATS, OTHER_NATS, 6222),
        (KEDA, NATS, 8222),
        (PROMETHEUS, NATS, 7777),
        (PROMETHEUS, VALKEY, 9121),
        (TOOLS, NATS, 4222),
        (TOOLS, VALKEY, 6379),
    ]
    refused: list[tuple[End, End, int]] = [
        (gateway, METADATA, 443),
        (gateway, INTERNAL, 443),
        (gateway, PUBLIC, 22),
        (STRANGER, NATS, 4222),
        (STRANGER, VALKEY, 6379),
        (FOREIGN, NATS, 4222),
        (FOREIGN, VALKEY, 6379),
        (STRANGER, NATS, 8222),
        (STRANGER, NATS, 6222),
        (gateway, NATS, 8222),
        (VALKEY, PUBLIC, 443),
        (NATS, PUBLIC, 443),
    ]
    for pod in (gateway, *workers):
        needed += [(pod, NATS, 4222), (pod, VALKEY, 6379)]
        refused += [(pod, other, port) for other in (STRANGER, FOREIGN) for port in (4222, 6379)]
        assert allowed(policies, pod, DNS, 53, "UDP") and allowed(policies, pod, DNS, 53)
    for pod in workers:
        needed += [(PROMETHEUS, pod, port) for port in pod.ports.values()]
        refused += [(who, pod, port) for port in pod.ports.values() for who in (STRANGER, gateway)]
        refused += [
            (gateway, pod, 8000),
            (pod, gateway, 22),
            (pod, METADATA, 80),
            (NATS, pod, 9464),
        ]
    if example(values).get("traces"):
        needed += [(pod, PROMETHEUS, 4318) for pod in (gateway, *workers)]  # of the same namespace
    from_hub = any(
        not m["source"].startswith("/") for m in example(values).get("models", {}).values()
    )
    (needed if from_hub else refused).extend((pod, PUBLIC, 443) for pod in workers)
    for source, target, port in needed:
        assert allowed(policies, source, target, port), (source, target, port)
    for source, target, port in refused:
        assert not allowed(policies, source, target, port), (source, target, port)


def policies_of(objects: list[Object]) -> list[Object]:
    return [
        {**found, "metadata": {**found["metadata"], "namespace": NAMESPACE}}
        for found in of_kind(objects, "NetworkPolicy")
    ]


def test_keys_and_values_go_between_prefill_and_decode_alone() -> None:
    objects = render(example("prefill-decode"))
    policies, gateway = policies_of(objects), gateway_of(objects)
    pods = {d["metadata"]["name"]: pod_of(d) for d in of_kind(objects, "Deployment")}
    encoder, prefill, decode = (pods[f"epd-epdflow-{n}"] for n in ("encoder", "prefill", "decode"))
    foreign = Pod({**prefill.labels, "app.kubernetes.io/instance": "else"}, NAMESPACE)
    ports = (5600, 5615, 25000, 25099)
    for port in ports:
        for source, target in ((decode, prefill), (prefill, decode), (decode, decode)):
            assert allowed(policies, source, target, port), (source, target, port)
        for other in (gateway, encoder, foreign, STRANGER, PROMETHEUS):
            assert not allowed(policies, other, prefill, port), (other, port)
            assert not allowed(policies, prefill, other, port), (other, port)
        assert not allowed(policies, prefill, PUBLIC, port)
    for port in (22, 5599, 5616, 24999, 25100):
        assert not allowed(policies, decode, prefill, port)


def test_without_these_roles_nobody_calls_a_worker() -> None:
    names = {found["metadata"]["name"] for found in of_kind(render({}), "NetworkPolicy")}
    assert names == {f"epd-epdflow-{what}" for what in ("gateway", "workers", "nats", "valkey")}


def test_who_may_reach_the_gateway_can_be_named() -> None:
    objects = render(example("cluster"))
    gateway = gateway_of(objects)
    assert allowed(policies_of(objects), INGRESS, gateway, 8000)
    assert allowed(policies_of(objects), PROMETHEUS, gateway, 8000)
    assert not allowed(policies_of(objects), STRANGER, gateway, 8000)


def test_brokers_elsewhere_are_reached_at_their_ports() -> None:
    brokers = {
        "nats": {"servers": ["n1.example.com:4333", "n2.example.com:4334"]},
        "valkey": {"server": "cache.example.com:6380"},
    }
    objects = render({"brokers": brokers, "networkPolicy": {"brokers": False}})
    policies, gateway = policies_of(objects), gateway_of(objects)
    assert [allowed(policies, gateway, INTERNAL, port) for port in (4333, 4334, 6380)] == [True] * 3
    assert not allowed(policies, gateway, INTERNAL, 4222)
    assert allowed(policies, STRANGER, NATS, 4222)  # it is not in these hands
