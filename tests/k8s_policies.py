"""Who may talk to whom, by NetworkPolicies: what a network plug-in would decide, as the API defines it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """One end of a connection inside the cluster."""

    labels: Mapping[str, str]
    namespace: str
    ports: Mapping[str, int] = field(default_factory=dict)  # by name

    @property
    def namespace_labels(self) -> dict[str, str]:
        return {"kubernetes.io/metadata.name": self.namespace}


@dataclass(frozen=True)
class Address:
    """One end outside of it."""

    ip: str


End = Pod | Address


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector fits; an empty one fits all."""
    assert selector.keys() <= {"matchLabels"}, "expressions are not needed here"
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def allowed(
    policies: list[Object], source: End, target: End, port: int, protocol: str = "TCP"
) -> bool:
    """Whether a connection is let out at its source and in at its target.

    Args:
        policies: NetworkPolicies, each with its namespace.
    """
    return _passes(policies, "Egress", source, target, target, port, protocol) and _passes(
        policies, "Ingress", target, source, target, port, protocol
    )


def _passes(
    policies: list[Object],
    direction: str,
    here: End,
    there: End,
    target: End,
    port: int,
    protocol: str,
) -> bool:
    if isinstance(here, Address):
        return True
    mine = [
        policy
        for policy in policies
        if policy["metadata"]["namespace"] == here.namespace
        and direction in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], here.labels)
    ]
    if not mine:  # nobody who is not selected is held up
        return True
    peers = "to" if direction == "Egress" else "from"
    return any(
        _has_port(rule, target, port, protocol) and _has_peer(rule, peers, there, here.namespace)
        for policy in mine
        for rule in policy["spec"].get(direction.lower()) or []
    )


def _has_port(rule: Object, target: End, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    if not ports:
        return True
    for wanted in ports:
        number = wanted["port"]
        if isinstance(number, str):
            number = target.ports.get(number) if isinstance(target, Pod) else None
        if number is None or wanted.get("protocol", "TCP") != protocol:
            continue
        if number <= port <= wanted.get("endPort", number):
            return True
    return False


def _has_peer(rule: Object, peers: str, there: End, namespace: str) -> bool:
    found = rule.get(peers)
    if not found:
        return True
    return any(_is_peer(peer, there, namespace) for peer in found)


def _is_peer(peer: Object, there: End, namespace: str) -> bool:
    if block := peer.get("ipBlock"):
        if not isinstance(there, Address):
            return False
        ip = ipaddress.ip_address(there.ip)
        outside = [ipaddress.ip_network(part) for part in block.get("except", [])]
        return ip in ipaddress.ip_network(block["cidr"]) and not any(ip in net for net in outside)
    if not isinstance(there, Pod):
        return False
    in_namespace = (
        selects(peer["namespaceSelector"], there.namespace_labels)
        if "namespaceSelector" in peer
        else there.namespace == namespace
    )
    return in_namespace and selects(peer.get("podSelector", {}), there.labels)
