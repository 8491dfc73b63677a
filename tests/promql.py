"""Asking a Prometheus the way Grafana does."""

from __future__ import annotations

import math

import httpx

RATE_INTERVAL = "1m"
"""What Grafana's ``$__rate_interval`` becomes: four scrapes at least."""


def answers(client: httpx.Client, query: str) -> bool:
    """Whether a panel's query gives a number now. A query that Prometheus does not take is an error."""
    query = query.replace("$__rate_interval", RATE_INTERVAL)
    answer = client.get("api/v1/query", params={"query": query})
    assert answer.status_code == 200, f"{query}: {answer.text}"
    return any(
        not math.isnan(float(series["value"][1])) for series in answer.json()["data"]["result"]
    )
