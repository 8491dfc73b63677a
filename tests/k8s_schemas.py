"""Schemas of custom resources, as far as the chart uses them: a field that is not here is refused.

Fields and forms are those that the documentation of KEDA and of the Prometheus operator describes.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}


def _object(properties: Schema, *required: str) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}
_LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_SELECTOR = _object({"matchLabels": _LABELS}, "matchLabels")


def _kind(version: str, kind: str, spec: Schema) -> Schema:
    return _object(
        {
            "apiVersion": {"const": version},
            "kind": {"const": kind},
            "metadata": _object({"name": TEXT, "namespace": TEXT, "labels": _LABELS}, "name"),
            "spec": spec,
        },
        "apiVersion",
        "kind",
        "metadata",
        "spec",
    )


def _number(least: int) -> Schema:
    return {"type": "integer", "minimum": least}


_NUMBER_AS_TEXT: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}


def _trigger(name: str, metadata: Schema) -> Schema:
    return _object(
        {
            "type": {"const": name},
            "name": {"type": "string", "pattern": "^[a-z0-9-]+$"},
            "metricType": {"enum": ["AverageValue", "Value"]},
            "metadata": metadata,
        },
        "type",
        "metadata",
    )


# All values of a trigger's metadata are strings.
_JETSTREAM = _trigger(
    "nats-jetstream",
    _object(
        {
            "natsServerMonitoringEndpoint": {"type": "string", "pattern": "^[^/]+:[0-9]+$"},
            "account": TEXT,
            "stream": TEXT,
            "consumer": TEXT,
            "lagThreshold": {"type": "string", "pattern": "^[0-9]+$"},
            "activationLagThreshold": {"type": "string", "pattern": "^[0-9]+$"},
        },
        "natsServerMonitoringEndpoint",
        "account",
        "stream",
        "consumer",
        "lagThreshold",
    ),
)
_PROMETHEUS = _trigger(
    "prometheus",
    _object(
        {
            "serverAddress": {"type": "string", "pattern": "^https?://"},
            "query": TEXT,
            "threshold": _NUMBER_AS_TEXT,
            "activationThreshold": _NUMBER_AS_TEXT,
        },
        "serverAddress",
        "query",
        "threshold",
    ),
)

_SCALED_OBJECT = _object(
    {
        "scaleTargetRef": _object({"name": TEXT, "kind": TEXT, "apiVersion": TEXT}, "name"),
        "pollingInterval": _number(1),
        "cooldownPeriod": _number(0),
        "minReplicaCount": _number(0),
        "maxReplicaCount": _number(1),
        "advanced": _object(
            {
                "horizontalPodAutoscalerConfig": _object(
                    {
                        "behavior": _object(
                            {"scaleDown": _object({"stabilizationWindowSeconds": _number(0)})}
                        )
                    }
                )
            }
        ),
        "triggers": {"type": "array", "minItems": 1, "items": {"oneOf": [_JETSTREAM, _PROMETHEUS]}},
    },
    "scaleTargetRef",
    "triggers",
)

_ENDPOINTS: Schema = {
    "type": "array",
    "minItems": 1,
    "items": _object(
        {
            "port": TEXT,
            "path": {"type": "string", "pattern": "^/"},
            "interval": DURATION,
            "relabelings": {
                "type": "array",
                "items": _object({"targetLabel": TEXT, "replacement": TEXT}, "targetLabel"),
            },
        },
        "port",
    ),
}
_RULE = _object(
    {"alert": TEXT, "expr": TEXT, "for": DURATION, "labels": _LABELS, "annotations": _LABELS},
    "alert",
    "expr",
)
_RULES = _object(
    {"name": TEXT, "rules": {"type": "array", "minItems": 1, "items": _RULE}}, "name", "rules"
)
_MONITORING = "monitoring.coreos.com/v1"

CUSTOM: dict[str, Schema] = {
    "ScaledObject": _kind("keda.sh/v1alpha1", "ScaledObject", _SCALED_OBJECT),
    "PrometheusRule": _kind(
        _MONITORING,
        "PrometheusRule",
        _object({"groups": {"type": "array", "minItems": 1, "items": _RULES}}, "groups"),
    ),
    "ServiceMonitor": _kind(
        _MONITORING,
        "ServiceMonitor",
        _object({"selector": _SELECTOR, "endpoints": _ENDPOINTS}, "selector", "endpoints"),
    ),
    "PodMonitor": _kind(
        _MONITORING,
        "PodMonitor",
        _object(
            {
                "selector": _SELECTOR,
                "podMetricsEndpoints": _ENDPOINTS,
                "podTargetLabels": {"type": "array", "items": TEXT},
            },
            "selector",
            "podMetricsEndpoints",
        ),
    ),
}
