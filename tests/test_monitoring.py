"""Prometheus's configuration, alerts and Grafana's dashboards, on a real Prometheus.

`make monitoring` unpacks Debian's package of it, and runs these. Grafana itself is not run: each dashboard is
looked at as Grafana would read it, and each panel's queries are asked as Grafana would ask them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from epd_cli.dashboards import COLUMNS, DASHBOARDS, Panel
from epd_cli.server_process import dying_with_parent
from promql import answers
from service_stack import eventually, picture, text_of
from sim_stack import sim_stack
from test_worker_metrics import free_port

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy" / "observability"
PROGRAMS = ROOT / "build" / "prometheus" / "usr" / "bin"
PANELS = [panel for _, panels in DASHBOARDS.values() for panel in panels]
ALERTS: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0][
    "rules"
]
FILES = sorted((DEPLOY / "dashboards").glob("*.json"))


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        [PROGRAMS / "promtool", *arguments], cwd=DEPLOY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- without Prometheus --------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_is_one_that_grafana_can_load(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    assert dashboard["uid"] == f"epdflow-{path.stem}"
    assert dashboard["title"] and dashboard["schemaVersion"] >= 36
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) == len(DASHBOARDS[path.stem][1])
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"] and panel["description"].endswith(".")
        assert [target["refId"] for target in panel["targets"]] == sorted(
            {target["refId"] for target in panel["targets"]}
        )
        for target in (panel, *panel["targets"]):
            assert target["datasource"] == {"type": "prometheus", "uid": "prometheus"}
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells


def test_provisioning_names_the_source_and_the_folder_that_compose_mounts() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasources.yml").read_text())["datasources"]
    assert (source["uid"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yml").read_text())["providers"]
    services = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./observability/dashboards"] == provider["options"]["path"]
    assert {path.stem for path in FILES} == set(DASHBOARDS)
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/overview.json"


def test_each_alert_says_what_to_do() -> None:
    headings = re.findall(r"^### (Epd\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.M)
    assert len(headings) == len(set(headings))
    assert {alert["alert"] for alert in ALERTS} == set(headings)
    for alert in ALERTS:
        name = alert["alert"]
        assert alert["labels"]["severity"] in ("page", "warn"), name
        assert alert["annotations"]["summary"].endswith("."), name
        assert alert["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"


def test_prometheus_finds_the_ports_of_the_compose_file() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    found = {
        job["job_name"]: (job["dns_sd_configs"][0]["names"], job["dns_sd_configs"][0]["port"])
        for job in config["scrape_configs"]
    }
    services = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())["services"]
    assert found.pop("gateway") == (["gateway"], 8000)
    for name, (hosts, port) in found.items():
        assert hosts == [name]
        environment = services[name]["environment"]
        merged = environment.get("<<", {}) | environment
        assert (merged["EPD_METRICS_HOST"], merged["EPD_METRICS_PORT"]) == ("0.0.0.0", port)


# -- with it -------------------------------------------------------------------------------------


@pytest.mark.prometheus
def test_the_configuration_is_right_and_alerts_fire_in_their_fault_alone() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "config", "prometheus.yml")
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")
    tested = (DEPLOY / "alerts_test.yml").read_text()
    assert all(f'alertname="{alert["alert"]}"' in tested for alert in ALERTS)


@contextlib.asynccontextmanager
async def prometheus(folder: Path, targets: dict[str, int]) -> AsyncIterator[httpx.Client]:
    """A Prometheus with the repository's configuration, but for where and how often it scrapes."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "alerts.yml")]
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [f"127.0.0.1:{targets.pop(job['job_name'])}"]}]
    assert not targets
    path, port = folder / "prometheus.yml", free_port()
    path.write_text(yaml.safe_dump(config))
    command = [
        str(PROGRAMS / "prometheus"),
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("wb") as log:
        server = await asyncio.create_subprocess_exec(*dying_with_parent(command), stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:

            def ready() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return client.get("-/ready").status_code == 200
                assert server.returncode is None, (folder / "log").read_text()
                return False

            await eventually(ready, "Prometheus is ready", 20)
            yield client
    finally:
        if server.returncode is None:
            server.terminate()
        await asyncio.wait_for(server.wait(), 10)


@pytest.mark.prometheus
async def test_every_panel_and_alert_on_a_real_prometheus(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Panels show something after a few requests, but for those that are of vLLM or of faults; no alert fires
    then. What no panel can show yet is asked all the same: Prometheus must take it."""
    async with sim_stack(nats_url, redis_url, tmp_path / "stack") as stack:
        encoder_port, pd_port = free_port(), free_port()
        await stack.add_encoder(metrics_port=encoder_port)
        await stack.add_pd(metrics_port=pd_port)
        await stack.add_gateway()
        await stack.ready()
        gateway_port = int(stack.gateway_url.rpartition(":")[2])
        ports = {"gateway": gateway_port, "encoder": encoder_port, "pd": pd_port}
        async with prometheus(tmp_path, ports) as client:

            async def shows(panel: Panel) -> bool:
                text_of(await stack.ask("what is it?", picture((64, 64)), picture((64, 64))))
                return all([await ask(query) for query, _ in panel.queries])

            async def ask(query: str) -> bool:
                return await asyncio.to_thread(answers, client, query)

            for panel in PANELS:
                if panel.where == "all":
                    await eventually(partial(shows, panel), panel.title, 20)
                else:
                    for query, _ in panel.queries:
                        assert not await ask(query), f"{panel.title} is not of {panel.where} alone"
            rules = (await asyncio.to_thread(client.get, "api/v1/rules")).json()["data"]
            (group,) = rules["groups"]
            assert len(group["rules"]) == len(ALERTS)
            assert {rule["health"] for rule in group["rules"]} == {"ok"}
            assert {rule["state"] for rule in group["rules"]} == {"inactive"}
